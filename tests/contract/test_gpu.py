"""The kernels, the checksum and a whole hand-over on a GPU, against what a CPU computes. Skipped where there is none."""

from __future__ import annotations

import random

import google_crc32c
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvtransfer import pieces  # noqa: E402
from kvtransfer.bounce import Bounce  # noqa: E402
from kvtransfer.checksum import checksum  # noqa: E402
from kvtransfer.connector.blocks import EngineBlocks  # noqa: E402
from kvtransfer.connector.worker import staging_allocator  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
BLOCKS = 64


@pytest.fixture(scope="module")
def device() -> torch.device:
    found = torch.device("cuda:0")
    torch.cuda.set_device(found)
    return found


def randoms(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


def caches(device: torch.device) -> dict[str, dict[str, torch.Tensor]]:
    """Layers as attention backends lay them out: contiguous blocks, heads outside tokens, key and value apart, interleaved."""
    whole = {f"l{i}": randoms((BLOCKS, 65536), device) for i in range(4)}
    heads = {f"l{i}": randoms((BLOCKS, 16, 8, 256), device).permute(0, 2, 1, 3) for i in range(3)}
    apart = {f"l{i}": randoms((2, BLOCKS, 16, 8, 64), device) for i in range(3)}
    odd = {f"l{i}": randoms((BLOCKS, 16, 3, 24), device) for i in range(2)}
    together = randoms((BLOCKS, 4, 8192), device)
    return {"whole": whole, "heads": heads, "apart": apart, "odd": odd, "together": {f"l{i}": together[:, i] for i in range(4)}}


@pytest.mark.parametrize("name", ["whole", "heads", "apart", "odd", "together"])
@pytest.mark.parametrize("where", ["device", "host"])
def test_gather_and_scatter_move_every_byte_and_no_other(device: torch.device, name: str, where: str) -> None:
    layers = caches(device)[name]
    blocks = EngineBlocks(layers, BLOCKS)
    memory = staging_allocator("device" if where == "device" else "host", device)
    ids, targets = random.Random(1).sample(range(BLOCKS), 13), random.Random(2).sample(range(BLOCKS), 13)
    rows = memory(13 * blocks.block_bytes).reshape(13, blocks.block_bytes)
    rows[:] = 0xA5
    before = blocks.digests(range(BLOCKS))
    copy = blocks.gather(ids, rows)
    assert copy is not None
    copy.wait()
    assert copy()
    assert blocks.digests(range(BLOCKS)) == before, "a gather changed the cache"
    if copy.crcs is not None:
        host = np.asarray(rows.cpu() if where == "device" else rows).reshape(-1)
        assert np.array_equal(copy.crcs.numpy().view(np.uint32), pieces.piece_crcs(host))
    scattered = blocks.scatter(rows, targets)
    assert scattered is not None
    scattered.wait()
    after = blocks.digests(range(BLOCKS))
    assert [after[target] for target in targets] == [before[source] for source in ids]
    others = set(range(BLOCKS)) - set(targets)
    assert all(after[block] == before[block] for block in others), "a scatter wrote outside its blocks"


@pytest.mark.parametrize("num_bytes", [4, 4096, 8192, 8196, 5 * 8192 + 1236, 3 << 20])
def test_the_device_and_the_host_agree_on_a_checksum(device: torch.device, num_bytes: int) -> None:
    data = randoms((num_bytes,), device)
    assert checksum(pieces.ALGORITHM, data) == checksum(pieces.ALGORITHM, data.cpu().numpy())
    assert checksum("crc32c", data).value == google_crc32c.value(data.cpu().numpy().tobytes())


def test_every_flipped_bit_is_seen(device: torch.device) -> None:
    data = randoms((4 * 8192,), device)
    before = checksum(pieces.ALGORITHM, data).value
    for place in random.Random(3).sample(range(len(data)), 64):
        data[place] ^= 1 << place % 8
        assert checksum(pieces.ALGORITHM, data).value != before
        data[place] ^= 1 << place % 8
    assert checksum(pieces.ALGORITHM, data).value == before


def test_bytes_bounce_to_the_host_and_back(device: torch.device) -> None:
    data, target = randoms((1_000_003,), device), torch.zeros(1_000_003, dtype=torch.uint8, device=device)
    there, back = Bounce(data, 65536), Bounce(target, 50_000)
    place = 0
    for piece in there.pieces(data):
        back.land(target[place : place + len(piece)], piece.tobytes())
        place += len(piece)
    back.finish()
    assert place == len(data)
    assert torch.equal(data, target)
