"""The gain of dynamic batches: queries by image from 1, 4, 16 and 64 concurrent clients, batched and one by one.

    python benchmarks/batching.py examples/v1 resnet18 --side 64 --seconds 3 --rounds 3

Two services run side by side on the same images, one with batches and one that encodes each query separately (with the
same number of threads). They take turns, ROUNDS times, SECONDS each; the best round counts, because other programs can
only slow a round. An encoder is a version folder or the name of a timm backbone, which is exported with random weights
for SIDE pixels. The clients are one asyncio process on the same cores. `encode` leaves out HTTP, decoding and search:
as many threads pass ready inputs. The last line is the largest difference between an embedding in a batch and the same
one alone.
"""

from __future__ import annotations

import asyncio
import io
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import typer
from command_line import Count, Seconds, run_main
from PIL import Image

from index.encoders.encoder import Encoder
from index.encoders.image import preprocess
from index.errors import InvalidArgument
from index.version import ENCODER, PROBE, Card, Preprocess, Version
from index.version_folder.folder import load_version, write_card
from regraft import Client, ImageItem, Problem, Unreachable
from service.http.app import serve
from service.registry.encoders.batching import Batcher
from service.registry.encoders.modalities import ImageModality
from service.settings import Settings
from service.store.database.migration import upgrade

ENCODERS = ["examples/v1", "resnet18"]
CLIENTS = (1, 4, 16, 64)
PORTS = {"batched": 18_411, "one by one": 18_412}
ITEMS, DIM = 256, 128
MODALITY_BATCHER = "service.registry.encoders.modalities.Batcher"
"""What makes the batches of an `ImageModality`."""


class OneByOne(Batcher[Any, Any]):
    """Encodes each request by itself, on its own thread."""

    def __call__(self, prepare: Callable[[], Sequence[Any]]) -> Any:
        return self._encode(prepare())


def main(
    encoders: Annotated[list[str], typer.Argument()] = ENCODERS,
    side: Count = 64,
    seconds: Seconds = 3.0,
    rounds: Count = 3,
) -> None:
    multiprocessing.set_start_method("spawn")
    for name in encoders:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(name) if Path(name).is_dir() else export(name, side, Path(scratch) / "exported")
            version = load_version(folder)
            print(f"\n{name}, {Encoder(version).spec.height} pixels; best of {rounds} rounds of {seconds:g} s\n")
            measure_encoding(version, seconds, rounds)
            measure_http(version, Path(scratch), seconds, rounds)
            off, size = difference(version)
            print(f"\nlargest difference of an embedding: {off:.1e}, in batches of up to {size}")


def measure_encoding(version: Version, seconds: float, rounds: int) -> None:
    settings = Settings()
    pixels = inputs(version, 64)
    batchers = {}
    for way, kind in (("batched", Batcher), ("one by one", OneByOne)):
        with patch(MODALITY_BATCHER, kind):
            batchers[way] = ImageModality(version, settings).queries
    print("| encode: threads | batched /s | one by one /s | ratio |\n| --- | --- | --- | --- |")
    for clients in CLIENTS:
        best = dict.fromkeys(batchers, 0.0)
        for _ in range(rounds):
            for way, batcher in batchers.items():
                best[way] = max(best[way], encode_for(batcher, pixels, clients, seconds))
        print(f"| {clients} | {best['batched']:.0f} | {best['one by one']:.0f} | {ratio(best):.2f} |", flush=True)


def encode_for(batcher: Batcher[Any, Any], pixels: Sequence[Any], clients: int, seconds: float) -> float:
    until, counts = time.perf_counter() + seconds, [0] * clients

    def ask(number: int) -> None:
        while time.perf_counter() < until:
            batcher(lambda: [pixels[number]])
            counts[number] += 1

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds


def measure_http(version: Version, scratch: Path, seconds: float, rounds: int) -> None:
    services = [multiprocessing.Process(target=run, args=(way, scratch / way.replace(" ", "-"))) for way in PORTS]
    for process in services:
        process.start()
    try:
        for port, process in zip(PORTS.values(), services, strict=True):
            fill(version, port, process)
        columns = "/s | CPU ms | p50 ms | p99 ms"
        print(f"\n| HTTP: clients | batched {columns} | one by one {columns} | ratio of /s | of CPU |")
        print(f"|{' --- |' * 11}")
        for clients in CLIENTS:
            best: dict[str, list[float]] = {way: [] for way in PORTS}
            spent = dict.fromkeys(PORTS, float("inf"))
            for _ in range(rounds):
                for (way, port), process in zip(PORTS.items(), services, strict=True):
                    before = cpu_seconds(process.pid)
                    took = asyncio.run(ask_for(port, clients, seconds, picture_files(version)))
                    best[way] = max(best[way], took, key=len)
                    spent[way] = min(spent[way], (cpu_seconds(process.pid) - before) / len(took))
            cells = " | ".join(row(best[way], spent[way], seconds) for way in ("batched", "one by one"))
            rates = len(best["batched"]) / len(best["one by one"])
            print(f"| {clients} | {cells} | {rates:.2f} | {ratio(spent):.2f} |", flush=True)
    finally:
        for process in services:
            process.terminate()
            process.join()


def run(way: str, data: Path) -> None:
    if way == "one by one":
        patch(MODALITY_BATCHER, OneByOne).start()
    settings = Settings(data=data, port=PORTS[way])
    upgrade(settings)
    serve(settings)


def fill(version: Version, port: int, service: multiprocessing.Process) -> None:
    with Client(f"http://127.0.0.1:{port}") as client:
        while True:
            try:
                client.ready()
                break
            except (Problem, Unreachable):
                if not service.is_alive():
                    raise
                time.sleep(0.1)
        client.register_version(version.folder)
        client.create_gallery("g")
        client.deploy("g", version.name)
        client.ingest("g", [ImageItem(str(n), image) for n, image in enumerate(picture_files(version, ITEMS))])


async def ask_for(port: int, clients: int, seconds: float, images: Sequence[bytes]) -> list[float]:
    """Latencies in seconds of all requests that `clients` connections could send, one after the other each."""
    took: list[float] = []
    until = time.perf_counter() + seconds

    async def ask(image: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b'--x\r\nContent-Disposition: form-data; name="images"; filename="q"\r\n\r\n' + image + b"\r\n--x--\r\n"
        head = f"POST /v1/galleries/g/query HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(body)}\r\n"
        message = head.encode() + b"Content-Type: multipart/form-data; boundary=x\r\n\r\n" + body
        while (started := time.perf_counter()) < until:
            writer.write(message)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200"), answer
            length = next(
                int(line[15:]) for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length")
            )
            await reader.readexactly(length)
            took.append(time.perf_counter() - started)
        writer.close()

    await asyncio.gather(*(ask(images[number % len(images)]) for number in range(clients)))
    return took


def difference(version: Version) -> tuple[float, int]:
    """Between embeddings of 256 concurrent requests and the same images one by one; and the largest batch."""
    encoder, sizes = Encoder(version), [0]

    def encode(batch: Sequence[Any]) -> Any:
        sizes.append(len(batch))
        time.sleep(0.001)  # an encoder that is too quick would not be batched
        return encoder.vectors(np.stack(batch))

    batcher: Any = Batcher(encode, size=64, wait_seconds=0.02, runs=1)
    pixels = inputs(version, 256)
    with ThreadPoolExecutor(64) as threads:
        together = np.concatenate(list(threads.map(lambda one: batcher(lambda: [one]), pixels)))
    alone = np.concatenate([encoder.vectors(one[None]) for one in pixels])
    return float(np.abs(together - alone).max()), max(sizes)


def pictures(version: Version, count: int) -> list[Image.Image]:
    spec = version.card.preprocess
    assert spec is not None
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (spec.height, spec.width, 3), np.uint8)) for _ in range(count)]


def picture_files(version: Version, count: int = 64) -> list[bytes]:
    files = []
    for picture in pictures(version, count):
        stream = io.BytesIO()
        picture.save(stream, "JPEG")
        files.append(stream.getvalue())
    return files


def inputs(version: Version, count: int) -> list[Any]:
    assert version.card.preprocess is not None
    return [preprocess(picture, version.card.preprocess) for picture in pictures(version, count)]


def row(took: Sequence[float], spent: float, seconds: float) -> str:
    p50, p99 = np.percentile(took, [50, 99]) * 1000
    return f"{len(took) / seconds:.0f} | {spent * 1000:.2f} | {p50:.1f} | {p99:.1f}"


def cpu_seconds(pid: int | None) -> float:
    """Processor time a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ratio(best: dict[str, float]) -> float:
    return best["batched"] / best["one by one"]


def export(backbone: str, side: int, folder: Path) -> Path:
    """A version folder of a timm backbone with random weights; returns the folder."""
    import timm
    import torch

    class Unit(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            if not timm.is_model(backbone):
                raise InvalidArgument(f"{backbone!r} is neither the folder of a version nor a backbone of timm")
            self.backbone = timm.create_model(backbone, pretrained=False, num_classes=DIM)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.normalize(self.backbone(image))

    folder.mkdir()
    model, image = Unit().eval(), torch.randn(2, 3, side, side)
    axes = {"image": {0: "N"}, "embedding": {0: "N"}}
    names: dict[str, Any] = {"input_names": ["image"], "output_names": ["embedding"], "dynamic_axes": axes}
    torch.onnx.export(model, (image,), folder / ENCODER, dynamo=False, opset_version=17, **names)
    with torch.no_grad():
        np.savez(folder / PROBE, image=image[:1].numpy(), embedding=model(image[:1]).numpy())
    write_card(folder, Card(backbone, DIM, {"kind": "cosine"}, Preprocess(side, side, "RGB")))
    return folder


if __name__ == "__main__":
    run_main(main)
