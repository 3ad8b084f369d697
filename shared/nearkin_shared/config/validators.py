"""Define the rules of settings.

Importing pydantic and building its validators takes 100 ms, more than restoring 50 MB. Defaults need no validation (a
test validates them), and plain values need only these rules (docs/adr/0004).

Invariant: a rule is stated once, at the field; pydantic applies it to values that are not plain.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nearkin_shared.config.pipeline_stages import stage_groups
from nearkin_shared.errors import ConfigError
from nearkin_shared.tenant_names import tenant_problem
from nearkin_shared.utils.frozen import frozen

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema


FORBID_OTHERS = {"extra": "forbid"}
"""A section's `__pydantic_config__`: refuse unknown settings."""
ORIGINS_MAX = 100
"""Web origins whose pages may use the API."""
TAG_LISTS_MAX = 1000
"""Rules of one retention policy that keep by tag."""
_ORIGIN = re.compile(r"https?://(?:[a-z0-9.-]{1,253}|\[[0-9a-f:.]{2,45}\])(?::[0-9]{1,5})?", re.ASCII)
FOLDER_BYTES_MAX = 4096
INDEX_SHARDS_MAX = 64
PARITY_SHARDS_MAX = 32
"""Data and parity shards together: the limit of the library."""


class UnknownName(ValueError):
    """An unknown name; carries the known names to the one-line error."""

    def __init__(self, known: tuple[str, ...]) -> None:
        super().__init__(f"choose one of {', '.join(known)}")
        self.known = known


class InvalidValue(ValueError):
    """A value out of its bounds; the text states the accepted values."""


class Rule:
    """The rule in a field's annotation.

    pydantic parses the value by its type, then `check` accepts or refuses it. None is not checked in a field that may
    be
    None.
    """

    check: Callable[[Any], Any]

    def schema_of(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema that parses the value before it is checked."""
        return handler(source)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self._check_unless_none, self.schema_of(source, handler))

    def _check_unless_none(self, value: Any) -> Any:
        return None if value is None else self.check(value)


@frozen
class NameChoice(Rule):
    """A name of a fixed list."""

    known: tuple[str, ...]

    def check(self, value: str) -> str:
        """Return `value`. Raises UnknownName."""
        if value not in self.known:
            raise UnknownName(self.known)
        return value


@frozen
class NameList(Rule):
    """Names of a fixed list in its order, with commas; `none` or `all`."""

    known: tuple[str, ...]

    def check(self, value: str) -> str:
        """Return the names in the order of the list, each once. Raises InvalidValue."""
        names = [name.strip() for name in value.split(",")]
        if names == ["none"]:
            return "none"
        if names == ["all"]:
            return ",".join(self.known)
        if unknown := next((name for name in names if name not in self.known), None):
            raise InvalidValue(f'"{unknown:.40}": want none, all, or a list of {", ".join(self.known)}')
        if "" in names:
            raise InvalidValue(f"an empty name: want none, all, or a list of {', '.join(self.known)}")
        return ",".join(name for name in self.known if name in names)


class _Number(Rule):
    """A number; True and False are refused, which pydantic counts as 1 and 0."""

    def describe_allowed(self) -> str:
        """Describe the accepted values."""
        raise NotImplementedError

    def schema_of(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema that parses a number."""
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(self.refuse_bool, handler(source))

    def refuse_bool(self, value: object) -> object:
        """Return `value`. Raises InvalidValue."""
        if isinstance(value, bool):
            raise InvalidValue(f"want {self.describe_allowed()}")
        return value


@frozen
class NumberRange(_Number):
    """A number in a closed range."""

    least: int
    most: int

    def describe_allowed(self) -> str:
        """Describe the accepted values."""
        return f"{self.least} to {self.most}"

    def check(self, value: int) -> int:
        """Return `value`. Raises InvalidValue."""
        if not self.least <= value <= self.most:
            raise InvalidValue(f"want {self.describe_allowed()}")
        return int(value)


@frozen
class ShareRange(_Number):
    """A share of a whole, from 0 up to a bound."""

    most: float

    def describe_allowed(self) -> str:
        """Describe the accepted values."""
        return f"a share from 0 to {self.most}"

    def check(self, value: float) -> float:
        """Return `value`. Raises InvalidValue."""
        if not 0 <= value <= self.most:
            raise InvalidValue(f"want {self.describe_allowed()}")
        return value


@frozen
class SizeRange(NumberRange):
    """A number of bytes, given as a number or as `8KiB`, `400MB`."""

    def describe_allowed(self) -> str:
        """Describe the accepted values."""
        return f"{self.least} to {self.most} bytes, or a unit after them: KiB, MB"

    def schema_of(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema that parses a number of bytes, with or without a unit."""
        from pydantic import ByteSize
        from pydantic_core import ValidationError, core_schema

        def read(value: Any, parse: Callable[[Any], int]) -> int:
            try:
                return parse(self.refuse_bool(value))
            except ValidationError as err:
                raise InvalidValue(f"want {self.describe_allowed()}") from err

        return core_schema.no_info_wrap_validator_function(read, handler.generate_schema(ByteSize))


@frozen
class Text(Rule):
    """Text of bounded length in UTF-8."""

    bytes_max: int

    def check(self, value: str) -> str:
        """Return `value`. Raises InvalidValue."""
        try:
            size_bytes = len(value.encode())
        except UnicodeEncodeError as err:
            raise InvalidValue("want valid UTF-8") from err
        if not 1 <= size_bytes <= self.bytes_max:
            raise InvalidValue(f"want 1 to {self.bytes_max} bytes")
        return value


@frozen
class LocalFolder(Rule):
    """A folder path independent of the current folder: absolute, or below a home folder."""

    def check(self, value: str) -> str:
        """Return `value`. Raises InvalidValue."""
        Text(FOLDER_BYTES_MAX).check(value)
        if "\0" in value or not value.startswith(("/", "~")):
            raise InvalidValue("want an absolute path, such as /var/cache/nearkin, or one that starts with ~")
        return value


@frozen
class TenantName(Rule):
    """A tenant's name."""

    def check(self, value: str) -> str:
        """Return `value`. Raises InvalidValue."""
        problem = tenant_problem(value)
        if problem is not None:
            raise InvalidValue(problem)
        return value


@frozen
class MatchingText(Rule):
    """Text that matches a pattern in full."""

    pattern: str

    def check(self, value: str) -> str:
        """Return `value`. Raises InvalidValue."""
        if not re.fullmatch(self.pattern, value):
            raise InvalidValue(f"want text that matches {self.pattern}")
        return value


@frozen
class ParityScheme(Rule):
    """`none`, or numbers of Reed-Solomon data and parity shards."""

    def check(self, value: str) -> str:
        """Return `value`. Raises InvalidValue."""
        matched = re.fullmatch(r"rs-([1-9][0-9]?)-([1-9][0-9]?)", value, re.ASCII)
        if value != "none" and (matched is None or int(matched[1]) + int(matched[2]) > PARITY_SHARDS_MAX):
            raise InvalidValue(f"want none, or rs-K-M with K + M up to {PARITY_SHARDS_MAX}, such as rs-28-4")
        return value


@frozen
class ServerUrl(Rule):
    """The URL of a gateway: http or https, a host, no query and no secret."""

    def check(self, value: str) -> str:
        """Return `value`. Raises InvalidValue."""
        match = re.fullmatch(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[!-~]*)?", value)
        if match is None or "?" in value or "#" in value or int((match[2] or ":80")[1:]) > 65_535:
            raise InvalidValue("want http:// or https:// with a host, such as https://nearkin.example:8443")
        return value


class CommaList(Rule):
    """A list; also text with commas, for environment variables."""

    def schema_of(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema that parses a list."""
        from pydantic_core import core_schema

        def split_list(value: object) -> object:
            if isinstance(value, str):
                return [entry.strip() for entry in value.split(",") if entry.strip()]
            return value

        return core_schema.no_info_before_validator_function(split_list, handler(source))


@frozen
class ShardUrls(CommaList):
    """URLs of index shards, each once; also text with commas, for environment variables."""

    def check(self, value: tuple[str, ...]) -> tuple[str, ...]:
        """Return `value`. Raises InvalidValue."""
        for url in value:
            try:
                ServerUrl().check(url)
            except InvalidValue as err:
                raise InvalidValue(f"{url!r:.80}: want http:// or https:// with a host and no password") from err
        if len(value) > INDEX_SHARDS_MAX:
            raise InvalidValue(f"has {len(value)} URLs; want at most {INDEX_SHARDS_MAX}")
        if len(set(value)) < len(value):
            raise InvalidValue("has a URL twice; each shard has its own")
        return value


@frozen
class TokenText(Rule):
    """A bearer token that an HTTP header can carry (RFC 6750, section 2.1)."""

    def check(self, value: str) -> str:
        """Return `value`. Raises InvalidValue."""
        if not re.fullmatch(r"[A-Za-z0-9._~+/-]{1,1024}=*", value):
            raise InvalidValue("want up to 1024 letters, digits and - . _ ~ + / without spaces")
        return value


@frozen
class Origins(CommaList):
    """Web origins as browsers send them; also text with commas, for environment variables."""

    def check(self, value: tuple[str, ...]) -> tuple[str, ...]:
        """Return `value`. Raises InvalidValue."""
        if len(value) > ORIGINS_MAX:
            raise InvalidValue(f"{len(value)} origins: want at most {ORIGINS_MAX}")
        for entry in value:
            if entry != "*" and _ORIGIN.fullmatch(entry) is None:
                raise InvalidValue(
                    f'{entry!r:.80}: want an origin such as "https://app.example", without a path, or "*"'
                )
        return value


@frozen
class TagLists(Rule):
    """Tags of versions, or several with commas, of which a version must have all."""

    def check(self, value: tuple[str, ...]) -> tuple[str, ...]:
        """Return `value`. Raises InvalidValue."""
        if len(value) > TAG_LISTS_MAX:
            raise InvalidValue(f"{len(value)} tags: want at most {TAG_LISTS_MAX}")
        for entry in value:
            if not all(tag.strip() for tag in entry.split(",")):
                raise InvalidValue(f"{entry!r:.80}: want a tag, or several separated by commas")
        return value


@frozen
class StageGroups(Rule):
    """Groups of pipeline stages, each of which runs in one process."""

    def check(self, value: str) -> str:
        """Return `value`. Raises InvalidValue."""
        try:
            stage_groups(value)
        except ConfigError as err:
            raise InvalidValue(str(err)) from err
        return value


@frozen
class TopicTenants(Rule):
    """Kafka topics, each as `topic` or `topic=tenant`.

    Also accepts a table from topics to tenants and, for environment variables, text with commas.
    """

    def schema_of(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema that parses a list, or a table as a list."""
        from pydantic_core import core_schema

        def split_list(value: object) -> object:
            if isinstance(value, str):
                return [entry.strip() for entry in value.split(",") if entry.strip()]
            return [f"{topic}={tenant}" for topic, tenant in value.items()] if isinstance(value, Mapping) else value

        return core_schema.no_info_before_validator_function(split_list, handler(source))

    def check(self, value: tuple[str, ...]) -> tuple[str, ...]:
        """Return `value`. Raises InvalidValue."""
        for entry in value:
            topic, equals, tenant = entry.partition("=")
            if not re.fullmatch(r"[A-Za-z0-9._-]{1,249}", topic) or bool(tenant) != bool(equals):
                raise InvalidValue(f"{entry!r:.80}: want a topic's name, or topic=tenant")
            problem = tenant_problem(tenant) if equals else None
            if problem is not None:
                raise InvalidValue(f"{entry!r:.80}: tenant: {problem}")
        if len({entry.partition("=")[0] for entry in value}) < len(value):
            raise InvalidValue("contains a topic twice; remove one")
        return value


@frozen
class ObjectPrefix(Rule):
    """A folder of the object store outside of the store's own folders."""

    store_folders: tuple[str, ...]

    def check(self, value: str) -> str:
        """Return `value`. Raises InvalidValue."""
        parts = value.split("/")
        is_folder = all(
            re.fullmatch(r"[A-Za-z0-9._=-]+|\{tenant\}", part) and part not in (".", "..") for part in parts[:-1]
        )
        if not is_folder or len(parts) < 2 or parts[-1] or len(value) > 512:
            raise InvalidValue("want a folder of names that ends in /, such as incoming/ or incoming/{tenant}/")
        if parts[0] in self.store_folders:
            raise InvalidValue(f"{parts[0]}/ belongs to the store; choose another folder")
        return value
