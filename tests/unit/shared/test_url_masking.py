"""Test that secrets in URLs are masked in displayed settings, errors and log lines."""

from __future__ import annotations

import string
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkin_shared.config.loader import displayed_value, load, with_changes
from nearkin_shared.config.settings import Settings
from nearkin_shared.errors import ConfigError
from nearkin_shared.utils.url_masking import mask_urls, url_secrets

SECRET = "hunter2-Geheim"
URLS = [
    f"redis://:{SECRET}@h:6379/0",
    f"redis://user:{SECRET}@h:6379/0",
    f"redis://h:6379/0?password={SECRET}",
    f"redis://h:6379/0?db=1&password={SECRET}&timeout=3",
    f"s3://id:{SECRET}@bucket/prefix",
    f"s3://bucket/prefix?secret_access_key={SECRET}",
    f"https://user:{SECRET}@host/path",
]
PASSWORDS = st.text(string.ascii_letters + string.digits + "@:?#%+~-_.!", min_size=6, max_size=40)


@pytest.mark.parametrize("url", URLS)
def test_url_with_a_secret_is_masked(url: str) -> None:
    """F.30: a password is masked as user information and as a parameter of a URL."""
    assert SECRET not in mask_urls(url)
    assert "***" in mask_urls(url)
    assert SECRET in list(url_secrets(url))


@given(PASSWORDS)
def test_any_password_of_a_url_is_masked(password: str) -> None:
    """F.30: nothing of a password of any characters is left, percent-encoded or not."""
    for written in (password, quote(password, safe="")):
        assert mask_urls(f"redis://u:{written}@h/0") == "redis://***@h/0"
    encoded = quote(password, safe="")
    assert mask_urls(f"redis://h/0?password={encoded}&db=1") == "redis://h/0?password=***&db=1"
    assert password in list(url_secrets(f"redis://h/0?password={encoded}"))


def test_url_without_a_secret_stays() -> None:
    """F.30: other parts are shown: a host, a bucket, a user alone in a log line."""
    for url in ("redis://127.0.0.1:6379/0", "s3://bucket/prefix", "https://host/v1?limit=3", "plain text ? a=b"):
        assert mask_urls(url) == url
        assert list(url_secrets(url)) == []
    assert list(url_secrets("redis://user@h")) == []


@pytest.mark.parametrize("name", ["redis.url", "object_store.url", "object_store.endpoint", "server"])
def test_setting_with_a_url_is_shown_masked(name: str) -> None:
    """F.30: every setting that may hold a URL is masked."""
    assert SECRET not in str(displayed_value(name, f"s3://id:{SECRET}@bucket?password={SECRET}"))


def test_error_about_a_url_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """F.30: a refused URL is quoted without its password."""
    monkeypatch.setenv("NEARKIN_SERVER", f"ftp://user:{SECRET}@host?password={SECRET}")
    with pytest.raises(ConfigError) as refused:
        load()
    assert SECRET not in str(refused.value)


def test_repr_of_settings_holds_no_secret() -> None:
    """F.30: a traceback or a debug line that shows the settings shows no password."""
    changes = {
        "kafka": {"sasl_password": SECRET},
        "redis": {"url": f"redis://:{SECRET}@h", "password": SECRET},
        "object_store": {"access_key_id": "id", "secret_access_key": SECRET, "session_token": SECRET},
    }
    assert SECRET not in repr(with_changes(Settings(), changes))
