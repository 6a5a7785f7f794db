"""What of the GPU path needs no GPU: the segment table, its alignment, where staging lies, and the kernels under Triton's
interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvtransfer.connector.blocks import block_segments  # noqa: E402
from kvtransfer.connector.cuda_blocks import COLUMNS, alignment, segment_table  # noqa: E402
from kvtransfer.connector.worker import staging_allocator  # noqa: E402
from kvtransfer.memory import on_device, use_device_of  # noqa: E402


def segments_of(*layers: torch.Tensor, num_blocks: int) -> list[tuple[int, torch.Tensor]]:
    found, place = [], 0
    for layer in layers:
        for segment in block_segments(layer, num_blocks):
            found.append((place, segment))
            place += segment.shape[1]
    return found


def test_the_table_finds_every_block_of_key_and_value_apart() -> None:
    layer = torch.arange(2 * 4 * 16, dtype=torch.int32).reshape(2, 4, 16)
    table = segment_table(segments_of(layer, num_blocks=4))
    assert table.shape == (2, COLUMNS)
    begin = layer.data_ptr()
    assert table.tolist() == [[begin, 64, 8, 0], [begin + 4 * 64, 64, 8, 8]]


def test_layers_follow_each_other_in_a_row() -> None:
    layers = [torch.zeros(4, 32, dtype=torch.uint8) for _ in range(3)]
    table = segment_table(segments_of(*layers, num_blocks=4))
    assert table[:, 0].tolist() == [layer.data_ptr() for layer in layers]
    assert table[:, 3].tolist() == [0, 4, 8]


def test_a_segment_of_half_words_is_refused() -> None:
    with pytest.raises(ValueError, match="whole 64-bit words"):
        segment_table(segments_of(torch.zeros(4, 12, dtype=torch.uint8), num_blocks=4))


@pytest.mark.parametrize(("column", "value"), [(0, 4096 + 8), (1, 24), (3, 1)])
def test_wide_access_needs_every_place_aligned(column: int, value: int) -> None:
    table = np.array([[4096, 64, 8, 0], [8192, 64, 8, 8]], np.int64)
    assert alignment(table, 128) == 16
    assert alignment(table, 136) == 8
    table[1, column] = value
    assert alignment(table, 128) == 8


def test_staging_lies_where_it_is_told() -> None:
    cpu = torch.device("cpu")
    memory = staging_allocator("auto", cpu)(4096)
    assert isinstance(memory, np.ndarray)
    assert not on_device(memory)
    assert not on_device(None)
    use_device_of(memory)
    assert isinstance(staging_allocator("host", cpu)(4096), np.ndarray)
    with pytest.raises(ValueError, match="staging_memory"):
        staging_allocator("device", cpu)


INTERPRETED = """
import numpy as np, torch
from kvtransfer import cuda_checksum, pieces
from kvtransfer.connector import cuda_blocks
from kvtransfer.connector.cuda_blocks import _move, segment_table

generator = np.random.default_rng(1)
for num_bytes in (4, 8192, 2 * 8192 + 1236):
    data = generator.integers(0, 256, num_bytes, dtype=np.uint8)
    assert np.array_equal(cuda_checksum.launch(torch.from_numpy(data)).numpy().view(np.uint32), pieces.piece_crcs(data))

layers = [torch.from_numpy(generator.integers(0, 256, (6, 72), dtype=np.uint8)) for _ in range(3)]
table = torch.from_numpy(segment_table([(72 * i, layer) for i, layer in enumerate(layers)]))
ids = torch.tensor([4, 0, 5])
rows = torch.zeros((3, 216), dtype=torch.uint8)
arguments = (table, ids, rows.view(-1).view(torch.int64), 27, 2)
_move[(3 * 2, 3)](*arguments, SCATTER=False, ALIGN=8, TILE=8)
assert torch.equal(rows, torch.cat([layer[ids] for layer in layers], dim=1))
wanted = [layer.clone() for layer in layers]
for layer in layers:
    layer[ids] = 0
_move[(3 * 2, 3)](*arguments, SCATTER=True, ALIGN=8, TILE=8)
assert all(torch.equal(layer, want) for layer, want in zip(layers, wanted))
print("equal")
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_kernels_compute_the_same_under_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "equal"
