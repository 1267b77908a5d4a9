"""The row state on the GPU: plans as words, and the device's mirror against the CPU's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from asyncsched.contract import NO_PAGES, ExecutorLimits, PageAppends, PrefillChunk, RowJoin, StepPlan
from asyncsched.gpu.cuda.deltas import DeltaPacker, StateLayout
from asyncsched.gpu.cuda.entry_pool import EntryPool
from asyncsched.gpu.cuda.kernels.row_update import scatter_words
from asyncsched.gpu.cuda.kernels.sampling import Sampled, SamplingWorkspace, sample
from asyncsched.gpu.cuda.row_record import (
    ALLOWED,
    DRAWS,
    ENTRY,
    LISTED,
    PENALISED,
    RECORD,
    RESTRICTED,
    SEEN,
    STOP,
    TOP_K,
    TOP_P,
    encode_join,
)
from asyncsched.gpu.cuda.row_state import RowState
from asyncsched.gpu.device_state import DeviceState
from asyncsched.sampling_params import SamplingParams

from .sampler_helpers import ints, join
from .triton_helpers import DEVICE

LIMITS = ExecutorLimits(max_rows=6, pages=40, page_size=4, max_model_len=32, vocab_size=50)
GREEDY = SamplingParams(temperature=0.0)


def state_of(*plans: StepPlan, limits: ExecutorLimits = LIMITS) -> RowState:
    state = RowState(limits, torch.device(DEVICE))
    for plan in plans:
        state.apply(state.pack(plan))
    return state


def paged(row: int, pages: list[int], *, cached: int = 0, params: SamplingParams = GREEDY) -> RowJoin:
    return RowJoin(row, row, ints(pages), cached, params, seed=row)


def appends(*triples: tuple[int, int, int]) -> PageAppends:
    rows, indices, pages = np.array(triples, np.int32).T
    return PageAppends(rows, indices, pages)


# -- records -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.1}, 0),
        ({}, DRAWS),
        ({"top_k": 1, "top_p": 0.5}, 0),
        ({"top_k": 5}, DRAWS | TOP_K),
        ({"top_k": 50}, DRAWS),
        ({"top_p": 0.9}, DRAWS | TOP_P),
        ({"temperature": 0.0, "logit_bias": {3: 1.0}}, LISTED),
        ({"temperature": 0.0, "logit_bias": {99: 1.0}}, 0),
        ({"temperature": 0.0, "allowed_token_ids": (3,)}, LISTED | RESTRICTED),
        ({"temperature": 0.0, "allowed_token_ids": (99,)}, RESTRICTED),
        ({"frequency_penalty": 0.5}, DRAWS | LISTED | PENALISED),
        ({"temperature": 0.0, "min_tokens": 2, "max_tokens": 9}, LISTED),
    ],
    ids=str,
)
def test_needs(options: dict[str, Any], needs: int) -> None:
    record, _ = encode_join(join(0, SamplingParams(**options), stop_ids=(7,)), 50, 64)
    assert record["needs"][0] == needs


def test_record() -> None:
    params = SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.1, presence_penalty=0.5, repetition_penalty=1.3)
    record, entries = encode_join(join(0, params, seed=2**63 - 1, prompt=[4, 4], output=[5]), 50, 64)
    values = {name: record[name][0] for name in RECORD.names or ()}
    expected = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1, "presence": 0.5, "frequency": 0.0, "repetition": 1.3}
    expected |= {"seed": 2**63 - 1, "position": 1, "top_k": 9, "list_size": 2, "list_room": 52}
    assert {name: values[name] for name in expected} == expected
    assert entries["token"].tolist() == [4, 5]
    assert entries["count"].tolist() == [0, 1]
    assert RECORD.itemsize == 96


def test_room_is_for_what_is_to_come() -> None:
    short = SamplingParams(frequency_penalty=1.0, max_tokens=3)
    _, entries = encode_join(join(0, short, output=[1, 2]), 1000, 2000)
    assert entries.size == 2
    rooms = [
        encode_join(join(0, params, output=[1, 2]), vocab, 2000)[0]["list_room"][0]
        for params, vocab in ((short, 1000), (SamplingParams(frequency_penalty=1.0, max_tokens=None), 10**6), (short, 5))
    ]
    assert rooms == [2 + 1 + 8, 2 + 1998 + 8, 2 + 5]


def test_everything_said_about_a_token_is_one_entry() -> None:
    params = SamplingParams(
        allowed_token_ids=(3, 9, 9, 70),
        logit_bias={3: 1e300, 4: -2.0, 5: 1.0, -1: 1.0},
        bad_token_ids=(5, 6, 50),
        repetition_penalty=1.2,
        min_tokens=4,
    )
    _, entries = encode_join(join(0, params, prompt=[9, 8, 60], output=[8, 8, 3], stop_ids=(3, 51)), 50, 64)
    rows = {int(e["token"]): (float(e["bias"]), int(e["marks"]), int(e["count"])) for e in entries}
    assert rows == {
        3: (pytest.approx(3e38), ALLOWED | STOP | SEEN, 1),
        4: (-2.0, 0, 0),
        5: (-np.inf, 0, 0),
        6: (-np.inf, 0, 0),
        8: (0.0, SEEN, 2),
        9: (0.0, ALLOWED | SEEN, 0),
    }
    assert entries["token"].tolist() == sorted(rows)


def test_prompt_matters_to_the_repetition_penalty_only() -> None:
    _, entries = encode_join(join(0, SamplingParams(presence_penalty=1.0), prompt=[1, 2], output=[3]), 50, 64)
    assert entries["token"].tolist() == [3]


# -- packing -----------------------------------------------------------------------------------


def test_a_plan_without_changes_is_no_words() -> None:
    packed = DeltaPacker(LIMITS).pack(StepPlan(1, decode=True))
    assert packed.words.size == packed.scattered == 0
    state = state_of()
    state.apply(packed)


def test_words_are_distinct_and_the_last_write_wins() -> None:
    packer = DeltaPacker(LIMITS)
    layout = packer.layout
    plan = StepPlan(
        1,
        leaves=(2, 1),
        joins=(paged(2, [7, 8], cached=4),),
        pages=appends((2, 1, 9), (2, 2, 10), (0, 0, 3), (0, 0, 4)),
        prefill=(PrefillChunk(2, 4, ints([1, 2, 3]), sample=True),),
    )
    packed = packer.pack(plan)
    indices, values = np.split(packed.words, 2)
    assert np.unique(indices).size == indices.size == packed.scattered
    written = dict(zip(indices.tolist(), values.tolist(), strict=True))
    table = layout.table + 2 * layout.columns
    assert [written[table + i] for i in range(3)] == [7, 9, 10]
    assert written[layout.table] == 4
    assert written[layout.lengths + 2] == 7
    assert (written[layout.active + 2], written[layout.active + 1]) == (1, 0)
    assert packed.words.dtype == np.int32


def test_fields_do_not_overlap() -> None:
    layout = StateLayout.of(LIMITS)
    starts = [layout.table, layout.lengths, layout.last_token, layout.active, layout.records, layout.words]
    sizes = [6 * 8, 6, 6, 6, 6 * 24]
    assert all(start + size <= end for start, size, end in zip(starts, sizes, starts[1:], strict=False))
    assert all(start % 64 == 0 for start in starts)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (StepPlan(3, leaves=(6,)), "step 3: rows 6"),
        (StepPlan(3, joins=(paged(-1, [1]),)), "rows -1"),
        (StepPlan(3, joins=(paged(0, [40]),)), "page ids 40"),
        (StepPlan(3, joins=(paged(0, [-1]),)), "page ids -1"),
        (StepPlan(3, joins=(paged(0, list(range(9))),)), "9 pages; a row has 8"),
        (StepPlan(3, joins=(paged(0, [1], cached=5),)), "5 cached tokens on 1 pages"),
        (StepPlan(3, pages=appends((6, 0, 1))), "row 6"),
        (StepPlan(3, pages=appends((0, 8, 1))), "index 8"),
        (StepPlan(3, pages=appends((0, 0, 40))), "page ids 40"),
        (StepPlan(3, prefill=(PrefillChunk(9, 0, ints([1]), sample=False),)), "rows 9"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_lies_outside_is_refused(plan: StepPlan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeltaPacker(LIMITS).pack(plan)


# -- on the device -----------------------------------------------------------------------------


def test_scatter() -> None:
    state = torch.arange(5000, dtype=torch.int32, device=DEVICE)
    indices = torch.randperm(5000, generator=torch.Generator().manual_seed(0))[:3000].int()
    words = torch.cat([indices, -indices - 1, torch.full((7,), 77, dtype=torch.int32)]).to(DEVICE)
    scatter_words(state, words, 3000)
    expected = torch.arange(5000, dtype=torch.int32)
    expected[indices.long()] = -indices - 1
    assert torch.equal(state.cpu(), expected)
    scatter_words(state, words, 0)
    with pytest.raises(ValueError, match="int32"):
        scatter_words(state, words.long(), 3000)
    with pytest.raises(ValueError, match="4000 writes"):
        scatter_words(state, words, 4000)


def test_a_join_writes_its_row_only() -> None:
    params = SamplingParams(temperature=0.3, top_p=0.9)
    state = state_of(StepPlan(1, joins=(paged(4, [5, 6, 7], cached=8, params=params),)))
    assert state.block_table[4].tolist() == [5, 6, 7, -1, -1, -1, -1, -1]
    assert state.length.tolist() == [0, 0, 0, 0, 8, 0]
    assert not state.active.any()
    record = state.records.cpu().numpy().view(RECORD)[4, 0]
    assert (record["temperature"], record["top_p"], record["seed"]) == (0.3, 0.9, 4)
    others = [0, 1, 2, 3, 5]
    assert (state.block_table[others] == -1).all()
    assert not state.records[others].any()


def entries_of(state: RowState, row: int) -> Any:
    record = state.records.cpu().numpy().view(RECORD)[row, 0]
    start, size = int(record["list_start"]), int(record["list_size"])
    return state._entries.cpu().numpy().view(ENTRY)[start : start + size, 0]


def test_lists_survive_that_the_pool_grows() -> None:
    limits = ExecutorLimits(max_rows=6, pages=4, page_size=16, max_model_len=4096, vocab_size=5000)
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0, max_tokens=None)
    state = state_of(StepPlan(1, joins=(join(0, params, output=[7, 7, 8]),)), limits=limits)
    address = state.pool_address
    joins = tuple(join(row, params, output=list(range(row, 3000))) for row in (1, 2))
    state.apply(state.pack(StepPlan(2, joins=joins)))
    assert state.pool_address is address
    assert int(address) == state._entries.data_ptr()
    assert state._entries.shape[0] >= 3 * 4096
    assert entries_of(state, 0)["count"].tolist() == [2, 1]
    for row in (1, 2):
        assert entries_of(state, row)["token"].tolist() == list(range(row, 3000))


def test_places_are_reused_and_never_shared() -> None:
    generator = np.random.default_rng(0)
    pool = EntryPool()
    owned: dict[int, range] = {}
    for _ in range(2000):
        row = int(generator.integers(30))
        if row in owned and generator.random() < 0.5:
            pool.release(row)
            del owned[row]
        else:
            room = int(generator.integers(1, 700))
            start = pool.take(row, room)
            owned.pop(row, None)
            assert all(start + room <= other.start or other.stop <= start for other in owned.values())
            owned[row] = range(start, start + room)
            assert start + room <= pool.capacity
    assert pool.capacity <= 64 * 1024
    pool.release(99)


@pytest.mark.parametrize("seed", range(3))
def test_random_plans_against_the_cpus_state(seed: int) -> None:
    """Tables, lengths, active rows and last tokens, over joins, chunks, decoding and leaving."""
    generator = np.random.default_rng(seed)
    host, state = DeviceState(LIMITS), state_of()
    workspace = SamplingWorkspace(6, 50, torch.device(DEVICE))
    free = list(generator.permutation(40))
    planned: dict[int, int] = {}  # row to tokens it has planned

    for step in range(1, 25):
        leaves = tuple(row for row in planned if generator.random() < 0.15 or planned[row] >= 27)
        for row in leaves:
            free += [int(page) for page in host.table[row] if page >= 0]
            del planned[row]
        decoding = [row for row in planned if host.active[row]]
        vacant = [row for row in range(6) if row not in planned]
        joins, chunks, added = [], [], []
        for row in vacant[: int(generator.integers(0, 3))]:
            first, second = int(free.pop()), int(free.pop())
            joins.append(paged(row, [first], cached=4))
            added.append((row, 1, second))
            sampled = bool(generator.random() < 0.7)
            chunks.append(PrefillChunk(row, 4, generator.integers(0, 50, 3, np.int32), sampled))
            planned[row] = 7
        for row in decoding:
            if planned[row] % 4 == 0:
                added.append((row, planned[row] // 4, int(free.pop())))
            planned[row] += 1
        pages = appends(*added) if added else NO_PAGES
        plan = StepPlan(step, tuple(joins), leaves, pages, tuple(chunks), decode=True)

        host.apply(plan)
        state.apply(state.pack(plan))
        packed = host.pack(plan)
        if packed is None:
            continue
        host.advance(plan, packed)
        n = packed.rows.size
        rows = torch.from_numpy(packed.rows).to(DEVICE)
        out = Sampled(torch.zeros_like(rows), torch.zeros_like(rows))
        logits = torch.from_numpy(generator.normal(size=(n, 50)).astype(np.float32)).to(DEVICE)
        sample(logits, rows, state, workspace, out, decoding=packed.decoding, greedy=True)
        host.last_token[packed.rows] = logits.argmax(1).cpu().numpy()

        given = host.table >= 0
        assert np.array_equal(state.block_table.cpu().numpy()[given], host.table[given])
        assert np.array_equal(state.length.cpu().numpy(), host.lengths)
        assert np.array_equal(state.active.cpu().numpy() != 0, host.active)
        assert np.array_equal(state.last_token.cpu().numpy(), host.last_token)
    assert host.lengths.max() > 12
