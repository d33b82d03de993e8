"""Other versions are named at import, with what is accepted."""

from importlib.metadata import PackageNotFoundError

import pytest

from lowbit_attn.integrations.torchtitan import versions


@pytest.mark.parametrize(("torchtitan", "torch", "line"), [
    ("0.2.2", "2.11.0", "0.2"), ("0.2.3.dev20260101+cpu", "2.13.0+cpu", "0.2"), ("0.3.0", "2.13.0+cpu", "0.3"),
    ("0.3.1", "2.15.0.dev20261101", "0.3"),
])
def test_accepted(torchtitan: str, torch: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", {"torchtitan": torchtitan, "torch": torch}.__getitem__)
    assert versions.release_line() == line


@pytest.mark.parametrize(("torchtitan", "torch", "message"), [
    ("0.2.1", "2.11.0", r"torchtitan: found version 0\.2\.1; accepted: 0\.2\.x from 0\.2\.2, or 0\.3\.x"),
    ("0.4.0", "2.15.0", r"torchtitan: found version 0\.4\.0; accepted"),
    ("1.0.0", "2.15.0", r"torchtitan: found version 1\.0\.0; accepted"),
    ("0.3.0", "2.11.0", r"torch: found version 2\.11\.0 with torchtitan 0\.3\.0; accepted: 2\.13 or newer"),
    ("0.2.2", "2.9.1", r"torch: found version 2\.9\.1 with torchtitan 0\.2\.2; accepted: 2\.11 or newer"),
])
def test_refused(torchtitan: str, torch: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", {"torchtitan": torchtitan, "torch": torch}.__getitem__)
    with pytest.raises(ImportError, match=message):
        versions.release_line()


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    with pytest.raises(ImportError, match=r"torchtitan: not installed; accepted: 0\.2\.x"):
        versions.release_line()
