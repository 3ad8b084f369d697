"""Record of a store's chunker settings.

Invariant: it is created once and never overwritten.

`chunking.json` names the profile and `chunker.*`. Data chunked with other settings share no chunks with the stored
data, so a put under other settings is refused unless forced. docs/internals/formats/chunking.md, docs/adr/0046.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, fields, replace
from functools import partial

from blake3 import blake3

from nearkin_shared.config.loader import with_changes
from nearkin_shared.config.plain import make_plain_settings
from nearkin_shared.config.reduction import NO_RULES, ChunkerSettings
from nearkin_shared.config.settings import PROFILES, Settings
from nearkin_shared.errors import ConfigError, Corrupt, FormatTooNew, NotFound, PermanentError
from nearkin_shared.formats.record_authentication import check_json_mac, mac_of_json
from nearkin_shared.objectstore.base import AlreadyExists, ObjectStore
from nearkin_shared.objectstore.delegating import record_key_of
from nearkin_shared.objectstore.parity import read_decoded
from nearkin_shared.storage import descriptor
from nearkin_shared.utils.frozen import frozen

NAME = "chunking.json"
FORMAT = "nearkin-chunking"
VERSION = 2
VERSION_WITHOUT_RULES = 1
"""Written where `chunker.rules` is `none`, so that releases without that setting read the record."""
BYTES_MAX = 64 * 1024
NAMES = ("profile", *(f"chunker.{setting.name}" for setting in fields(ChunkerSettings)))
"""Names of the recorded settings."""
_log = logging.getLogger("nearkin")


@frozen
class ChunkingRecord:
    """Profile and chunker settings with which a store is written."""

    profile: str
    chunker: ChunkerSettings

    def values(self) -> dict[str, object]:
        """Return the recorded settings by dotted name."""
        return {"profile": self.profile, **{f"chunker.{name}": each for name, each in asdict(self.chunker).items()}}


def record_of(settings: Settings) -> ChunkingRecord:
    """Return the record of these settings."""
    return ChunkingRecord(settings.profile, settings.chunker)


def encode_record(record: ChunkingRecord, mac_key: bytes | None) -> bytes:
    """Encode a record as JSON with a MAC and a check; without a key it has no MAC."""
    chunker = asdict(record.chunker)
    version = VERSION
    if chunker["rules"] == NO_RULES:
        version = VERSION_WITHOUT_RULES
        del chunker["rules"]
    body: dict[str, object] = {
        "format": FORMAT,
        "format_version": version,
        "profile": record.profile,
        "chunker": chunker,
    }
    if mac_key is not None:
        body["mac"] = mac_of_json(body, mac_key)
    return json.dumps({**body, "check": _check(body)}, indent=1).encode()


def decode_record(data: bytes, name: str, mac_key: bytes | None) -> ChunkingRecord:
    """Decode a record. Raises Corrupt (also for a wrong MAC), FormatTooNew."""
    try:
        if len(data) > BYTES_MAX:
            raise ValueError(f"{len(data)} bytes; at most {BYTES_MAX}")  # noqa: TRY301 - one place adds the remedy
        body = json.loads(data)
        if body.pop("check") != _check(body) or body["format"] != FORMAT:
            raise ValueError("its check fails")  # noqa: TRY301
        if body["format_version"] not in (VERSION_WITHOUT_RULES, VERSION):
            raise FormatTooNew(
                f"{name}: format {body['format_version']}; this Nearkin reads up to {VERSION}: upgrade Nearkin"
            )
        if mac_key is not None:
            check_json_mac(body, mac_key, name)
        return ChunkingRecord(_text(body["profile"]), _chunker(body["chunker"], body["format_version"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise Corrupt(f"{name}: not a record of chunker settings: {err}; restore it from a copy") from err


def read_record(objects: ObjectStore) -> ChunkingRecord | None:
    """Return the record of a store, or None.

    Raises: Corrupt, FormatTooNew, StoreUnavailable.
    """
    try:
        return read_decoded(objects, NAME, partial(decode_record, mac_key=record_key_of(objects)))
    except NotFound:
        return None


def check_record(objects: ObjectStore, bare: ObjectStore) -> None:
    """Check the record as stored in `bare`, without parity.

    Raises: NotFound, Corrupt, FormatTooNew.
    """
    decode_record(bare.get(NAME), NAME, record_key_of(objects))


def create_record(objects: ObjectStore, settings: Settings) -> ChunkingRecord:
    """Create the record of a store without one; return that of another process, if first."""
    made = record_of(settings)
    try:
        objects.put_new(NAME, encode_record(made, record_key_of(objects)))
    except AlreadyExists:
        return read_record(objects) or made
    return made


def has_record(objects: ObjectStore) -> bool:
    """Return whether a store has the record, damaged or not.

    Raises: StoreUnavailable.
    """
    try:
        objects.size_bytes(NAME)
    except NotFound:
        return False
    return True


def descriptor_bytes(objects: ObjectStore) -> int:
    """Return the size of descriptor and record together.

    Raises: NotFound, without a descriptor.
    """
    size_bytes = objects.size_bytes(descriptor.NAME)
    return size_bytes + (objects.size_bytes(NAME) if has_record(objects) else 0)


class ChunkingGuard:
    """Check of writers against the store's chunking record.

    Invariant: reads never fail because of the record.

    `settings` has the store's values where the caller set none; `explicit` has the dotted names that the caller set,
    None means those that differ from the defaults. If a set value differs from the record the settings stay as given,
    and `prepare_put` refuses them unless `force` or `storage.allow_other_chunking`.
    """

    def __init__(
        self, objects: ObjectStore, settings: Settings, explicit: Collection[str] | None = None, *, force: bool = False
    ) -> None:
        self._objects = objects
        self._force = force or settings.storage.allow_other_chunking
        self._problem: PermanentError | None = None
        self.record: ChunkingRecord | None = None
        self.settings: Settings = settings
        self._is_explicit = _explicit_test(settings, explicit)
        self._ready = False
        try:
            self.record = read_record(objects)
        except (Corrupt, FormatTooNew) as err:
            self._problem = err
        if self.record is not None and not self._conflict(self.record):
            try:
                self.settings = _adopt(settings, self.record, self._is_explicit)
            except ConfigError as err:  # such as chunker.min_bytes above the store's chunker.max_bytes
                self._problem = err

    def prepare_put(self) -> None:
        """Check that the settings are the store's; create a missing record.

        With force it warns once instead of raising.

        Raises: ConfigError, for other settings. Corrupt or FormatTooNew, for an unreadable record.
        """
        if self._ready:
            return
        problem = self._problem
        if self.record is None and problem is None:
            self.record = create_record(self._objects, self.settings)
            _log.warning("%s: recorded for later puts: %s", NAME, shown_values(self.record.values()))
        if self.record is not None and (conflict := self._conflict(self.record)):
            problem = ConfigError(conflict)
        if problem is not None:
            if not self._force:
                raise problem
            _log.warning("forced: %s", problem)
        self._ready = True

    def _conflict(self, record: ChunkingRecord) -> str | None:
        return describe_conflict(self.settings, record, self._is_explicit)


def describe_conflict(
    settings: Settings, record: ChunkingRecord, is_explicit: Callable[[str], bool] = lambda _name: True
) -> str | None:
    """Return the error text for set values that differ from the store's, or None."""
    given, recorded = record_of(settings).values(), record.values()
    other = [name for name in NAMES if given[name] != recorded[name] and is_explicit(name)]
    if not other:
        return None
    set_values = shown_values({name: given[name] for name in other})
    stored_values = shown_values({name: recorded[name] for name in other})
    return (
        f"{set_values}: this store is written with {stored_values}; data chunked otherwise share no chunks with its "
        "data; leave the setting out to use the store's, or allow it with `nearkin put --force` (API: force=True; "
        "services and `nearkin serve`: storage.allow_other_chunking)"
    )


def check_service_settings(objects: ObjectStore, settings: Settings) -> None:
    """Check a service's settings against the record; create a missing record.

    With `storage.allow_other_chunking` it warns about other settings.

    Raises: ConfigError, for other settings. Corrupt, FormatTooNew.
    """
    record = read_record(objects) or create_record(objects, settings)
    conflict = describe_conflict(settings, record)
    if conflict is None:
        return
    if not settings.storage.allow_other_chunking:
        raise ConfigError(conflict)
    _log.warning("storage.allow_other_chunking: %s", conflict)


def shown_values(values: Mapping[str, object]) -> str:
    """Format settings for a message."""
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _explicit_test(settings: Settings, explicit: Collection[str] | None) -> Callable[[str], bool]:
    """Return a test of whether the caller set a dotted name."""
    if explicit is not None:
        return explicit.__contains__
    plain, profile = asdict(Settings()), PROFILES.get(settings.profile, {})
    given = asdict(settings)

    def differs(name: str) -> bool:
        section, _, last = name.rpartition(".")
        if not section:
            return bool(given[last] != plain[last])
        value = given[section][last]
        return bool(value not in (plain[section][last], profile.get(section, {}).get(last, plain[section][last])))

    return differs


def _adopt(settings: Settings, record: ChunkingRecord, is_explicit: Callable[[str], bool]) -> Settings:
    """Return the settings with the store's profile and chunker where the caller set none.

    Raises: ConfigError.
    """
    if record_of(settings) == record:
        return settings
    changes: dict[str, dict[str, object]] = {}
    if settings.profile != record.profile and record.profile in PROFILES:
        plain = asdict(Settings())
        before = {section: {name: plain[section][name] for name in of} for section, of in _profile(settings.profile)}
        for section, values in (*before.items(), *_profile(record.profile)):
            unset = {name: each for name, each in values.items() if not is_explicit(f"{section}.{name}")}
            changes[section] = {**changes.get(section, {}), **unset}
    changes["chunker"] = asdict(record.chunker)
    adopted = with_changes(settings, changes)
    return replace(adopted, profile=record.profile) if record.profile in PROFILES else adopted


def _profile(name: str) -> list[tuple[str, Mapping[str, object]]]:
    return list(PROFILES.get(name, {}).items())


def _text(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 64:
        raise ValueError(f"profile {value!r:.80}")
    return value


def _chunker(value: object, version: int) -> ChunkerSettings:
    """Decode chunker settings, with a check of their types. Raises ValueError.

    Their bounds are checked by the settings.
    """
    defaults = asdict(ChunkerSettings())
    if isinstance(value, dict) and version == VERSION_WITHOUT_RULES and "rules" not in value:
        value = {**value, "rules": NO_RULES}
    if not isinstance(value, dict) or value.keys() != defaults.keys():
        raise ValueError("unknown or missing chunker settings")
    for name, default in defaults.items():
        if type(value[name]) is not type(default):
            raise ValueError(f"chunker.{name} {value[name]!r:.80}")
    plain = make_plain_settings({"chunker": value})  # every command reads the record: pydantic takes 100 ms to import
    if plain is not None:
        return plain.chunker
    try:
        return with_changes(Settings(), {"chunker": value}).chunker
    except ConfigError as err:
        raise ValueError(str(err)) from err


def _check(body: Mapping[str, object]) -> str:
    """Return a check, 16 hex digits, over all fields in canonical order."""
    return blake3(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest(length=8)
