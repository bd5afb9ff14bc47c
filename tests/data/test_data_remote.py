"""Shards behind URLs: a real S3 server, a proxy that breaks connections, a cache that is too small."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from shard_examples import TOKENIZER, caption_of, loader, write_samples, write_trees
from tiny_run import same_weights, tiny

from powerclip.data import remote
from powerclip.data.batch import BatchSpec
from powerclip.data.remote import RemoteCache, RemoteFile, describe, expand_urls, fetch
from powerclip.data.remote_shards import RemoteShards, open_remote
from powerclip.data.shard_loader import ShardLoader, ShardOptions
from powerclip.data.shard_order import StreamOrder
from powerclip.data.tar_index import load_index
from powerclip.errors import UserError
from powerclip.train.loop import train

pytest.importorskip("moto.server", reason="moto[server] is not installed")
pytest.importorskip("s3fs")

SIZES = [5, 4, 6, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Four shards; the first has its index beside it, and the second its trees."""
    folder = tmp_path_factory.mktemp("shards")
    paths = write_samples(folder, SIZES)
    load_index(paths[0])
    write_trees(paths[1], {f"s{number:04d}": caption_of(f"s{number:04d}") for number in range(5, 9)})
    return folder


@pytest.fixture(scope="module")
def server(folder) -> Iterator[str]:
    """An S3 server with the bucket `bucket`; its address."""
    import boto3
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    address = f"http://{host}:{port}"
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=address, **keys)
    client.create_bucket(Bucket="bucket")
    for path in folder.iterdir():
        client.put_object(Bucket="bucket", Key=f"x/{path.name}", Body=path.read_bytes())
    yield address
    moto.stop()


@pytest.fixture
def bucket(server, monkeypatch) -> Iterator[str]:
    """The URL of the folder of shards."""
    yield from use_server(server, monkeypatch)


def use_server(address: str, monkeypatch) -> Iterator[str]:
    import s3fs

    for name, value in (("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setattr(remote, "PAUSES", (0.0, 0.0, 0.0))
    s3fs.S3FileSystem.clear_instance_cache()
    yield "s3://bucket/x"
    s3fs.S3FileSystem.clear_instance_cache()


def remote_loader(shards: RemoteShards, **settings) -> ShardLoader:
    spec = BatchSpec(image_size=(16, 16), grid=(2, 2), batch_size=4, regions=3, **settings)
    return ShardLoader(shards, spec, TOKENIZER, ShardOptions(trees=False, window=1))


def stored(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.glob("*/*.tar"))


def test_remote_shards_give_the_batches_of_local_ones_through_a_cache_that_holds_half_of_them(tmp_path, folder, bucket):
    urls = expand_urls(f"{bucket}/*.tar", "data.shards")
    assert urls == expand_urls(f"{bucket}/{{00000..00003}}.tar", "data.shards")
    tars = sorted(folder.glob("*.tar"))
    limit = sum(tar.stat().st_size for tar in tars) // 2
    expected = [batch.images for batch in loader(tars, window=1, workers=0).stream(0, 9)]
    shards = open_remote(urls, tmp_path / "cache", limit)
    assert shards.counts == SIZES
    for workers, start in ((0, 0), (1, 4)):  # from the beginning, and as a run that is resumed
        batches = list(remote_loader(shards, workers=workers).stream(start, 9))
        assert all(torch.equal(batch.images, images) for batch, images in zip(batches, expected[start:], strict=True))
        assert 0 < stored(tmp_path / "cache") <= limit


def test_what_lies_beside_remote_shards_is_used_and_nothing_more_is_fetched(tmp_path, bucket):
    cache = tmp_path / "cache"
    first = open_remote([f"{bucket}/00000.tar", f"{bucket}/gone.tar"], cache, 10**9, trees=True)
    assert first.counts == [5, 0]
    assert "1 shard missing" in first.summary()
    assert not list(cache.glob("*/*.tar"))  # its index told
    open_remote([f"{bucket}/00001.tar"], cache, 10**9, trees=True)
    assert len(list(cache.glob("*/00001.trees.parquet"))) == 1
    (copy,) = cache.glob("*/00001.tar")  # it had none
    copy.unlink()
    assert open_remote([f"{bucket}/00001.tar"], cache, 10**9).counts == [4]
    assert not copy.exists()  # its index is kept


def test_the_next_window_is_fetched_while_one_is_read_and_no_further_one(tmp_path, bucket):
    shards = open_remote(expand_urls(f"{bucket}/*.tar", "data.shards"), tmp_path / "cache", 10**9)
    for copy in (tmp_path / "cache").glob("*/*.tar"):
        copy.unlink()
    order = StreamOrder(shards.counts, seed=0, window=1)
    starts, windows = zip(*order.windows(0, sum(SIZES)), strict=True)

    def wait_for(shard: int) -> None:
        while not shards.paths[shard].exists():
            time.sleep(0.01)

    with shards.ahead(order, 0, sum(SIZES)) as prefetch:
        wait_for(windows[1][0])
        assert not shards.paths[windows[2][0]].exists()
        prefetch.reached(starts[1])
        wait_for(windows[2][0])
        assert not shards.paths[windows[3][0]].exists()


def test_a_run_on_remote_shards_learns_what_one_on_local_ones_does(tmp_path, folder, bucket, capsys):
    copies = tmp_path / "local"
    shutil.copytree(folder, copies)
    common = ["data.source=shards", "train.steps=4", "data.window=2"]
    train(tiny(tmp_path, *common, f"data.shards={copies}/*.tar"), tmp_path / "here", quiet=True)
    settings = [*common, f"data.shards={bucket}/*.tar", f"data.cache={tmp_path}/cache", "data.cache_size=0.01"]
    train(tiny(tmp_path, *settings), tmp_path / "there")
    assert same_weights(tmp_path / "here", tmp_path / "there")
    said = capsys.readouterr().out.replace("\n", " ")
    assert f"4 shards, 18 samples; read through {tmp_path}/cache (0.01 GB)" in said
    assert "14 captions parsed now by the embedded parser" in said
    assert "1 of 4 sidecars were there" in said


def test_a_cache_that_is_smaller_than_a_shard_is_refused(tmp_path, bucket):
    with pytest.raises(UserError, match=r"data\.cache_size is .* GB, but s3://bucket/x/00001\.tar alone has"):
        open_remote([f"{bucket}/00001.tar"], tmp_path / "cache", 1000)


# ---- connections that break ------------------------------------------------------------------------------------------


@contextmanager
def breaking_proxy(address: str, breaks: list[int]) -> Iterator[str]:
    """A proxy that closes a connection after so many bytes of the answer, one after another; then it lets all pass."""
    host, port = address.removeprefix("http://").split(":")
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, target: socket.socket, limited: bool) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(4096):
                if limited and breaks and passed + len(data) > breaks[0]:
                    target.sendall(data[: breaks.pop(0) - passed])
                    break
                target.sendall(data)
                passed += len(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection((host, int(port)))
                for ends, limited in (((near, far), False), ((far, near), True)):
                    threading.Thread(target=pump, args=(*ends, limited), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    with closing(listener):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_connection_that_breaks_is_tried_again(tmp_path, folder, server, monkeypatch):
    breaks = [6000, 7000]
    with breaking_proxy(server, breaks) as address:
        for bucket in use_server(address, monkeypatch):
            file = describe(f"{bucket}/00002.tar")
            fetch(file, tmp_path / "copy.tar")
    assert not breaks
    assert (tmp_path / "copy.tar").read_bytes() == (folder / "00002.tar").read_bytes()


class Broken(SimpleHTTPRequestHandler):
    """Answers with half of what it says."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "10000")
        self.end_headers()
        self.wfile.write(b"x" * 5000)

    def log_message(self, *_: object) -> None:
        pass


class Whole(SimpleHTTPRequestHandler):
    """Python's own file server, which does not know ranges."""

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def web_server(handler) -> Iterator[str]:
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
    finally:
        httpd.shutdown()
        httpd.server_close()


def test_a_store_that_never_answers_whole_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "PAUSES", (0.0, 0.0))
    with web_server(Broken) as address:
        file = RemoteFile(f"{address}/a.tar", 10_000, "1")
        cache = RemoteCache(tmp_path, 10**9, [file])
        with pytest.raises(UserError, match=r"http://.*/a\.tar cannot be fetched: .*\(tried 3 times\)") as caught:
            cache.get(cache.path(file.url))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("*/*.tar"))


def test_a_fetch_goes_on_after_what_is_there_also_from_servers_without_ranges(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(remote, "_CHUNK", 4096)
    with web_server(partial(Whole, directory=str(folder))) as address:
        file = describe(f"{address}/00001.tar")
        whole = (folder / "00001.tar").read_bytes()
        # What a process that was killed has left.
        (tmp_path / f".c.tar.{file.mtime_ns // 10**9:08x}.partial").write_bytes(whole[:5000])
        fetch(file, tmp_path / "c.tar")
    assert (tmp_path / "c.tar").read_bytes() == whole


def test_a_library_that_is_missing_is_named(monkeypatch):
    import fsspec

    def missing(url: str) -> None:
        raise ImportError("Install s3fs")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(
        UserError, match=r"s3://b/a\.tar cannot be opened: it needs s3fs: pip install 'powerclip\[s3\]'"
    ):
        describe("s3://b/a.tar")
