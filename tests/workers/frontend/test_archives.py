"""Models that come with their data files as a zip or tar: the same model as in one file, or refused by name."""

from __future__ import annotations

import io
import resource
import stat
import struct
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto, helper

from tests.workers.models import make_model, matmuls, normal, port
from tests.workers.models import save as save_model
from tuning_db.catalog import ModelInfo
from tuning_db.errors import InvalidModel, InvalidRequest
from workers.frontend import inspect as inspector
from workers.frontend import onnx_model

SECRET = "a line that only the machine's owner may read"


def with_data_file(location: str = "weights.bin", **entries: str) -> tuple[bytes, bytes]:
    """`matmuls` with the first weight, 8x4, in a data file; and that file."""
    model = matmuls()
    tensor = model.graph.initializer[0]
    data = tensor.raw_data
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in ({"location": location} | entries).items():
        tensor.external_data.add(key=key, value=value)
    return model.SerializeToString(), data


def tar_of(members: dict[str, bytes | tarfile.TarInfo], format: int = tarfile.PAX_FORMAT) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=format) as tar:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                tar.addfile(content)
                continue
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return target.getvalue()


def zip_of(members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return target.getvalue()


def stored_zip_of(members: dict[str, bytes]) -> bytes:
    return zip_of(members, zipfile.ZIP_STORED)


def gnu_tar_of(members: dict[str, bytes]) -> bytes:
    return tar_of(dict(members), tarfile.GNU_FORMAT)


def write(folder: Path, content: bytes) -> Path:
    path = folder / "upload"
    path.write_bytes(content)
    return path


def refusal(path: Path) -> str:
    """What the inspector says of an upload that it must refuse."""
    with pytest.raises(InvalidModel) as caught:
        inspector.inspect(path, None)
    message = str(caught.value)
    assert SECRET not in message
    assert "root:" not in message
    assert len(message) < 1000
    return message


@pytest.mark.parametrize("pack", [tar_of, gnu_tar_of, zip_of, stored_zip_of])
@pytest.mark.parametrize("folder", ["", "./", "net/v1/", "a" * 120 + "/"])
def test_same_model_as_in_one_file(pack: Callable[..., bytes], folder: str, tmp_path: Path) -> None:
    """The digest, the ports and the weights are those of the model with its data inside, wherever it is packed."""
    model, data = with_data_file("./weights.bin", offset="64", length="128")
    content = pack({f"{folder}model.onnx": model, f"{folder}weights.bin": bytes(64) + data, "README": b"hello"})
    path = write(tmp_path, content)
    loaded = onnx_model.load(path)
    assert loaded.graph.initializer[0].raw_data == matmuls().graph.initializer[0].raw_data
    alone = inspector.inspect(save_model(matmuls(), tmp_path), {"x": {"shape": [2, 8]}})
    assert inspector.inspect(path, {"x": {"shape": [2, 8]}}) == alone


def test_data_is_in_the_digest(tmp_path: Path) -> None:
    """One byte of a data file changes the digest (tvm#6022, onnx#3559)."""
    model, data = with_data_file()
    changed = bytes([data[0] ^ 1]) + data[1:]
    digests = {
        inspector.inspect(write(tmp_path, tar_of({"model.onnx": model, "weights.bin": weights})), None)["digest"]
        for weights in (data, changed)
    }
    assert len(digests) == 2


def large(elements: int) -> tuple[ModelProto, bytes]:
    weights = normal(elements)
    model = make_model(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        [port("x", elements)],
        [port("y", elements)],
        {"w": weights},
    )
    return model, weights.tobytes()


@pytest.mark.parametrize("pack", [tar_of, zip_of])
def test_large_data_is_read_in_pieces(pack: Callable[..., bytes], tmp_path: Path) -> None:
    """Of a large tensor the inspector keeps the digest alone, the same as with its data inside; a worker takes all."""
    model, data = large(1 << 20)
    whole = onnx_model.model_digest(model)
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="w")
    path = write(tmp_path, pack({"model.onnx": model.SerializeToString(), "w": data}))
    lean = onnx_model.load(path, leave_out_from_bytes=1 << 16)
    assert lean.ByteSize() < 1000
    assert onnx_model.model_digest(lean) == whole
    assert inspector.inspect(path, {"x": {"shape": [1 << 20]}})["digest"] == whole
    assert onnx_model.load(path).graph.initializer[0].raw_data == data


def test_four_bit_data(tmp_path: Path) -> None:
    """Elements that share bytes have one digest inside and outside."""
    model = matmuls()
    raw = np.random.default_rng(0).bytes(100_001)
    inside = helper.make_tensor("w4", TensorProto.INT4, [200_001], raw, raw=True)
    outside = TensorProto(name="w4", data_type=TensorProto.INT4, dims=[200_001], data_location=TensorProto.EXTERNAL)
    outside.external_data.add(key="location", value="w")
    model.graph.initializer.append(outside)
    path = write(tmp_path, tar_of({"m.onnx": model.SerializeToString(), "w": raw}))
    lean = onnx_model.load(path, leave_out_from_bytes=1)
    assert onnx_model._hash_tensor(lean.graph.initializer[2]) == onnx_model._hash_tensor(inside)


LOCATIONS = {
    "../../etc/passwd": "not a path inside",
    "../" * 12 + "etc/passwd": "not a path inside",
    "/etc/passwd": "not a path inside",
    "weights.bin/../../secret": "not a path inside",
    "C:\\secret": "not a path inside",
    "..\\..\\secret": "not a path inside",
    "weights.bin\0x": "not a path inside",
    "": "does not say in which",
    ".": "does not hold",
    "secret": "does not hold",
    "link": "does not hold",
    "sub/weights.bin": "does not hold",
    "/proc/self/environ": "not a path inside",
}


@pytest.mark.parametrize("pack", [tar_of, zip_of])
@pytest.mark.parametrize(("location", "says"), LOCATIONS.items())
def test_locations_outside(pack: Callable[..., bytes], location: str, says: str, tmp_path: Path) -> None:
    """Data is looked for among the archive's members and nowhere else (onnx#3991): a file of that name beside the
    archive, or a link to one, is not opened."""
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    model, data = with_data_file(location)
    assert says in refusal(write(tmp_path, pack({"model.onnx": model, "weights.bin": data})))


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"offset": "-1"}, "the offset of its data is '-1'"),
        ({"length": "-1"}, "the length of its data is '-1'"),
        ({"length": str(1 << 60)}, "and that file has 128 bytes"),
        ({"offset": str(1 << 60)}, "and that file has 128 bytes"),
        ({"offset": "9" * 5000}, "no number of bytes"),
        ({"offset": "0x10"}, "no number of bytes"),
        ({"offset": "٣"}, "no number of bytes"),
        ({"offset": "64"}, "has 64 bytes of data in 'weights.bin', and needs 128"),
        ({"length": "64"}, "and needs 128"),
        ({"offset": "64", "length": "128"}, "and that file has 128 bytes"),
    ],
)
def test_offsets_and_lengths(entries: dict[str, str], says: str, tmp_path: Path) -> None:
    """Where data begins and ends must lie inside its file, and fit the tensor's type and shape."""
    model, data = with_data_file(**entries)
    assert says in refusal(write(tmp_path, tar_of({"model.onnx": model, "weights.bin": data})))


def link(kind: bytes, name: str = "weights.bin", target: str = "/etc/passwd") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    ("member", "says"),
    [
        (link(tarfile.SYMTYPE), "'weights.bin' is a symbolic link"),
        (link(tarfile.LNKTYPE), "'weights.bin' is a hard link"),
        (link(tarfile.LNKTYPE, target="model.onnx"), "'weights.bin' is a hard link"),
        (link(tarfile.CHRTYPE), "no plain file"),
        (link(tarfile.BLKTYPE), "no plain file"),
        (link(tarfile.FIFOTYPE), "no plain file"),
        (link(b"\x99"), "no plain file"),
        (link(tarfile.SYMTYPE, "../outside"), "would lie outside"),
        (link(tarfile.REGTYPE, "/etc/cron.d/x"), "would lie outside"),
        (link(tarfile.REGTYPE, "a/../../x"), "would lie outside"),
        (link(tarfile.REGTYPE, "x" * 2000), "longer than"),
        (link(tarfile.REGTYPE, "model.onnx"), "'model.onnx' twice"),
        (link(tarfile.REGTYPE, "./model.onnx"), "'model.onnx' twice"),
        (link(tarfile.REGTYPE, "other.ONNX"), "2 .onnx files"),
    ],
)
def test_members_of_a_tar(member: tarfile.TarInfo, says: str, tmp_path: Path) -> None:
    """Links, devices, names that lead outside and names that stand twice end the reading, by name."""
    model, _ = with_data_file()
    content = tar_of({"model.onnx": model, "z": member})
    if member.type == b"\x99":  # unknown types are plain files to old tars, which is not asked for here
        assert refusal(write(tmp_path, content))
    else:
        assert says in refusal(write(tmp_path, content))


def zip_member(**changes: Any) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(changes.pop("name", "weights.bin"))
    for field, value in changes.items():
        setattr(info, field, value)
    return info


@pytest.mark.parametrize(
    ("member", "says"),
    [
        (zip_member(external_attr=(stat.S_IFLNK | 0o777) << 16), "'weights.bin' is a symbolic link"),
        (zip_member(external_attr=stat.S_IFIFO << 16), "no plain file"),
        (zip_member(name="../outside"), "would lie outside"),
        (zip_member(name="/outside"), "would lie outside"),
        (zip_member(name="c:\\outside"), "would lie outside"),
        (zip_member(name="other.onnx"), "2 .onnx files"),
        (zip_member(compress_type=zipfile.ZIP_BZIP2), "compressed in a way"),
    ],
)
def test_members_of_a_zip(member: zipfile.ZipInfo, says: str, tmp_path: Path) -> None:
    """As of a tar."""
    model, data = with_data_file()
    path = tmp_path / "upload"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model.onnx", model)
        archive.writestr(member, data)
    assert says in refusal(path)


def bomb() -> bytes:
    return zip_of({"model.onnx": with_data_file()[0], "weights.bin": bytes(256 << 20)})


def bomb_model() -> bytes:
    return zip_of({"model.onnx": bytes(256 << 20)})


def lying(content: bytes, name: bytes, size: int) -> bytes:
    """The zip with another size claimed for the member `name`, in both of its headers."""
    edited = bytearray(content)
    for magic, at in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        start = 0
        while (start := content.find(magic, start)) >= 0:
            length = 30 if magic == b"PK\x03\x04" else 46
            if content[start + length : start + length + len(name)] == name:
                edited[start + at : start + at + 4] = struct.pack("<I", size)
            start += 4
    return bytes(edited)


def lying_small() -> bytes:
    return lying(bomb(), b"weights.bin", 128)


def lying_large() -> bytes:
    members = dict(zip(("model.onnx", "weights.bin"), with_data_file(), strict=True))
    return lying(zip_of(members), b"model.onnx", len(members["model.onnx"]) + 100)


def lying_huge() -> bytes:
    return lying(lying_large(), b"weights.bin", 0xFFFFFFF0)


def wrong_checksum() -> bytes:
    model, data = with_data_file()
    content = stored_zip_of({"model.onnx": model, "weights.bin": data})
    return content.replace(data, data[:-1] + bytes([data[-1] ^ 1]))


def many_members() -> bytes:
    return tar_of({f"f{i}": b"" for i in range(5000)})


def tar_beyond_its_end() -> bytes:
    info = tarfile.TarInfo("weights.bin")
    info.size = 1 << 60
    return tar_of({"model.onnx": with_data_file()[0]})[:-10240] + info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


def tar_cut() -> bytes:
    model, data = with_data_file()
    content = gnu_tar_of({"model.onnx": model, "weights.bin": data})
    return content[: sum(512 + len(file) + -len(file) % 512 for file in (model, data))]


def tar_name_of_names() -> bytes:
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 0
    return header.tobuf(tarfile.GNU_FORMAT) * 20_000


def tar_long_attributes() -> bytes:
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 1 << 40
    return header.tobuf(tarfile.GNU_FORMAT) + bytes(4096)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (bomb, "unpacks to"),
        (bomb_model, "unpacks to"),
        (lying_small, "damaged"),
        (lying_large, "claims another size"),
        (lying_huge, "unpacks to"),
        (wrong_checksum, "damaged"),
        (many_members, "more than 4096 members"),
        (tar_beyond_its_end, "ends within"),
        (tar_cut, "the tar ends without its mark"),
        (tar_name_of_names, "damaged"),
        (tar_long_attributes, "too long"),
        (lambda: zip_of({}), "no .onnx file"),
        (lambda: zip_of({"a.txt": b"x"}), "it holds 'a.txt'"),
        (lambda: b"\x1f\x8b" + bytes(600), "a gzip archive"),
        (lambda: b"PK\x03\x04 not a zip at all", "the zip is damaged"),
    ],
)
def test_bombs_and_lies(make: Callable[[], bytes], says: str, tmp_path: Path) -> None:
    """An archive that unpacks to far more than it is, or is not what its headers claim, ends by name, and nothing
    large is read into memory or left on the disk."""
    path = write(tmp_path, make())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert says in refusal(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (64 << 10)  # KiB
    assert list(tmp_path.iterdir()) == [path]


def test_shared_bytes(tmp_path: Path) -> None:
    """Tensors may share the bytes of a data file, but not without end: reading them would take for ever."""
    model, data = large(1 << 16)
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="w")
    for index in range(100):
        model.graph.initializer.add().CopyFrom(tensor)
        model.graph.initializer[-1].name = f"w{index}"
    assert "share" in refusal(write(tmp_path, tar_of({"model.onnx": model.SerializeToString(), "w": data})))


def test_more_than_is_unpacked(tmp_path: Path) -> None:
    """Archives of more than 16 GiB are refused at once; nothing is read."""
    model, _ = large(4)
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.dims[:] = [5 << 30]
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="w")
    info = tarfile.TarInfo("w")
    info.size = 4 * (5 << 30)
    content = tar_of({"model.onnx": model.SerializeToString()}).rstrip(b"\0")
    path = write(tmp_path, content + bytes(-len(content) % 512) + info.tobuf())
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + info.size + 1024)
    assert f"and {16 << 30} are taken" in refusal(path)


def read_all(path: Path) -> None:
    """Everything that the inspector does with an upload, twice."""
    found = inspector.inspect(path, None)
    model = onnx_model.load(path, leave_out_from_bytes=1)
    inputs = onnx_model.inputs_of(model)
    shapes = {p.name: {"shape": [s if isinstance(s, int) else 2 for s in p.shape]} for p in inputs}
    ModelInfo(str(found["digest"]), "", "onnx", 0, inputs, onnx_model.outputs_of(model)).bind(shapes)
    inspector.inspect(path, shapes)


_MEMBERS = dict(zip(("model.onnx", "weights.bin"), with_data_file(offset="0", length="128"), strict=True))
_SEEDS = [pack(_MEMBERS) for pack in (tar_of, gnu_tar_of, zip_of, stored_zip_of)]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.sampled_from(_SEEDS),
    edits=st.lists(st.tuples(st.integers(0, 100_000), st.integers(0, 255)), max_size=4),
    cut=st.none() | st.integers(0, 100_000),
)
def test_damaged_archives(seed: bytes, edits: list[tuple[int, int]], cut: int | None, tmp_path: Path) -> None:
    """Whatever is damaged in an archive, it is read or refused as a request's fault; nothing else is raised."""
    data = bytearray(seed)
    for position, value in edits:
        data[position % len(data)] = value
    with suppress(InvalidRequest):
        read_all(write(tmp_path, bytes(data if cut is None else data[: cut % len(data)])))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    entries=st.lists(
        st.tuples(
            st.sampled_from(["location", "offset", "length", "checksum", "basepath", "tunery.digest"]),
            st.sampled_from([*LOCATIONS, "weights.bin", "model.onnx", "0", "-1", "128", str(1 << 60), "x" * 300])
            | st.text(max_size=8),
        ),
        max_size=4,
    ),
    data_type=st.sampled_from([0, 1, 7, 8, 10, 16, 21, 22, 99]),
    dims=st.lists(st.sampled_from([0, 1, 4, 8, 1 << 31, 1 << 62, -1]), max_size=3),
    names=st.tuples(st.sampled_from(["model.onnx", "d/m.onnx", "../m.onnx"]), st.sampled_from([*LOCATIONS, "w.onnx"])),
    pack=st.sampled_from([tar_of, zip_of]),
)
def test_mutated_external_data(
    entries: list[tuple[str, str]],
    data_type: int,
    dims: list[int],
    names: tuple[str, str],
    pack: Callable[..., bytes],
    tmp_path: Path,
) -> None:
    """Whatever a tensor says of its data, in whatever archive, it is read or refused without a look elsewhere."""
    (tmp_path / "secret").write_text(SECRET)
    model = matmuls()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.data_type = data_type
    tensor.dims[:] = dims
    for key, value in entries:
        tensor.external_data.add(key=key, value=value)
    content = pack(
        {names[0]: model.SerializeToString(), "weights.bin": bytes(128), names[1].replace("\0", "") or "z": b"z"}
    )
    said = ""
    try:
        read_all(write(tmp_path, content))
    except InvalidRequest as error:
        said = str(error)
    assert SECRET not in said
    assert "root:" not in said
