"""Which modules are blocks, by the bytes that their calls save: the rule beside one that looks at each call anew."""

from collections.abc import Hashable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchoffload._fit.choosing import choice as choice_module
from torchoffload._fit.choosing.call_tree import CallTree, ModuleCall
from torchoffload._fit.choosing.choice import Choice, choose_blocks


def tree_of(nested: tuple, nbytes: dict[int, int], fixed_bytes: int = 0) -> CallTree:
    """A tree from ``(module, [part, ...], inputs, work, operators)``, whose parts are calls or saved storages."""
    saves: list[int] = []

    def call(given: tuple) -> ModuleCall:
        module, parts, *rest = given
        inputs, work, operators = (*rest, *((), 0, 1)[len(rest) :])
        found = ModuleCall(
            module, begin=len(saves), inputs=frozenset(inputs), work_bytes=work, operator_count=operators
        )
        for part in parts:
            if isinstance(part, tuple):
                found.calls.append(call(part))
            else:
                saves.append(part)
        found.end = len(saves)
        return found

    return CallTree(call(nested), saves, nbytes, fixed_bytes)


# What the rule says, written down call by call, with no thought for time.


def calls_of(call: ModuleCall) -> Iterator[ModuleCall]:
    yield call
    for inner in call.calls:
        yield from calls_of(inner)


def need(tree: CallTree, module: Hashable) -> int:
    needs = []
    for call in calls_of(tree.root):
        if call.module == module:
            saved = tree.saved_in(call)
            work = max(each.work_bytes for each in calls_of(call))
            needs.append((tree.total_bytes(saved | call.inputs) if saved else 0) + work)
    return max(needs)


def blocks_within(tree: CallTree, window: int) -> set[Hashable]:
    calls = list(calls_of(tree.root))
    callers = {call.module for call in calls if call.calls}
    counts: dict[Hashable, int] = {}
    for call in calls:
        count = sum(each.operator_count for each in calls_of(call))
        counts[call.module] = max(count, counts.get(call.module, 0))

    def walk(call: ModuleCall) -> Iterator[Hashable]:
        if not tree.saved_in(call):
            return
        module = call.module
        is_small = (
            module is not None and need(tree, module) <= window and counts[module] <= choice_module.MOST_OPERATORS
        )
        if is_small or (module is not None and module not in callers):
            yield module
        else:
            for inner in call.calls:
                yield from walk(inner)

    return set(walk(tree.root))


def outermost_calls(call: ModuleCall, modules: set[Hashable]) -> Iterator[ModuleCall]:
    if call.module in modules:
        yield call
    else:
        for inner in call.calls:
            yield from outermost_calls(inner, modules)


def least(tree: CallTree, modules: set[Hashable], share: float) -> tuple[int, int]:
    blocks = [call for call in outermost_calls(tree.root, modules) if tree.saved_in(call)]
    positions_in_blocks = {number for call in blocks for number in range(call.begin, call.end)}
    outside = {storage for number, storage in enumerate(tree.saves) if number not in positions_in_blocks}
    moments = []
    for number, block in enumerate(blocks):
        inside = tree.saved_in(block) | block.inputs
        staying = {storage for storage in outside if tree.saves.index(storage) < block.end}
        earlier = {storage for before in blocks[:number] for storage in before.inputs} - inside - staying
        work = max(call.work_bytes for call in calls_of(block))
        moments.append(tree.total_bytes(staying | inside) + work + int(share * tree.total_bytes(earlier)))
    inputs = {storage for block in blocks for storage in block.inputs} - outside
    moments.append(tree.total_bytes(outside) + int(share * tree.total_bytes(inputs)))
    return max(moments), len(blocks)


def chosen_by_definition(tree: CallTree, share: float) -> tuple[int, int]:
    modules = {call.module for call in calls_of(tree.root)} - {None}
    sets = [blocks_within(tree, need(tree, module)) for module in modules]
    results = [least(tree, each, share) for each in sets if each]
    if not results:
        return 0, 0
    best = min(nbytes for nbytes, _ in results)
    most = best + choice_module.TOLERANCE * (best + tree.fixed_bytes)
    return min((count, nbytes) for nbytes, count in results if nbytes <= most)[::-1]


@st.composite
def trees(draw: st.DrawFn) -> CallTree:
    storages = st.integers(0, 11)
    modules = st.integers(0, 7)
    inputs = st.sets(storages, max_size=3)
    work, operators = st.integers(0, 40), st.integers(0, 3000)
    parts = st.recursive(
        storages,
        lambda inner: st.tuples(modules, st.lists(inner, max_size=5), inputs, work, operators),
        max_leaves=24,
    )
    root = (draw(st.sampled_from([None, 99])), draw(st.lists(parts, max_size=6)), draw(inputs), draw(work), 1)
    nbytes = {number: draw(st.integers(0, 100)) for number in range(12)}
    return tree_of(root, nbytes, draw(st.sampled_from([0, 0, 500])))


@given(tree=trees(), share=st.sampled_from([0.5, 1.0]))
def test_the_choice_is_that_of_the_rule_written_down_call_by_call(tree: CallTree, share: float):
    choice = choose_blocks(tree, share_that_stays=share)
    assert (choice.least_bytes, choice.call_count) == chosen_by_definition(tree, share)
    if choice.modules:
        assert least(tree, set(choice.modules), share) == (choice.least_bytes, choice.call_count)


@given(tree=trees(), sets=st.lists(st.sets(st.integers(0, 7)), max_size=3))
def test_other_sets_are_chosen_if_they_are_better(tree: CallTree, sets: list[set[int]]):
    choice = choose_blocks(tree, share_that_stays=1.0, also=sets)
    counts = [sum(each.operator_count for each in calls_of(call)) for call in calls_of(tree.root)]
    if max(counts) <= choice_module.MOST_OPERATORS:
        for modules in sets:
            nbytes, _ = least(tree, set(modules), 1.0)
            if any(tree.saved_in(call) for call in outermost_calls(tree.root, set(modules))):
                slack = choice_module.TOLERANCE * (nbytes + tree.fixed_bytes)
                assert choice.least_bytes <= nbytes + slack + 1e-6
    if choice.modules:
        assert least(tree, set(choice.modules), 1.0) == (choice.least_bytes, choice.call_count)


@given(tree=trees())
def test_no_module_is_a_block_that_saves_nothing_or_has_too_many_operators(tree: CallTree):
    calls = list(calls_of(tree.root))
    callers = {call.module for call in calls if call.calls}
    for module in choose_blocks(tree, share_that_stays=1.0).modules:
        of_module = [call for call in calls if call.module == module]
        assert any(tree.saved_in(call) for call in of_module)
        if module in callers:
            for call in of_module:
                assert sum(each.operator_count for each in calls_of(call)) <= choice_module.MOST_OPERATORS


def layer(name: str, number: int, bytes_inside: int = 1) -> tuple:
    """A block with an input and four storages inside."""
    return name, [10 * number, *(10 * number + each for each in range(1, 5))], {10 * number}, bytes_inside


def sizes(count: int) -> dict[int, int]:
    return {10 * number + each: 10 for number in range(count) for each in range(5)}


def test_layers_of_one_size_are_blocks():
    model = ("model", [layer(f"layer {number}", number) for number in range(8)])
    assert choose_blocks(tree_of(model, sizes(8)), share_that_stays=1.0).modules == tuple(
        f"layer {number}" for number in range(8)
    )


def test_the_blocks_of_stages_are_blocks_and_not_the_stages():
    stages = [
        (f"stage {number}", [layer(f"block {10 * number + each}", 6 * number + each) for each in range(6)])
        for number in range(2)
    ]
    choice = choose_blocks(tree_of(("model", stages), sizes(12)), share_that_stays=1.0)
    assert len(choice.modules) == 12
    assert all(str(module).startswith("block") for module in choice.modules)


def test_fewer_blocks_are_better_if_they_hardly_need_more():
    """Two small modules inside of each layer would need 4 % less: not enough for twice as many calls."""
    nbytes = {0: 1000} | dict.fromkeys(range(1, 9), 5)
    halves = [
        (f"layer {n}", [(f"half {n} {m}", [4 * n + 2 * m + 1, 4 * n + 2 * m + 2]) for m in range(2)]) for n in range(2)
    ]
    model = ("model", [("large", [0]), *halves])
    assert set(choose_blocks(tree_of(model, nbytes), share_that_stays=1.0).modules) <= {
        "model",
        "large",
        "layer 0",
        "layer 1",
    }


def test_nothing_saved_is_no_blocks():
    assert choose_blocks(tree_of(("model", [("layer", [])]), {}), share_that_stays=1.0) == Choice((), 0, 0)


@pytest.mark.parametrize("is_known", [False, True])
def test_weights_and_gradients_make_a_difference_matter_less(is_known: bool):
    model = ("model", [layer(f"layer {number}", number) for number in range(8)])
    fixed = 1_000_000 if is_known else 0
    assert len(choose_blocks(tree_of(model, sizes(8), fixed), share_that_stays=1.0).modules) == (1 if is_known else 8)


def test_the_order_of_saves_counts():
    """Logits that are saved behind the last block are gone when the blocks' backward comes."""
    early = tree_of(("model", [99, *(layer(f"layer {n}", n) for n in range(4))]), sizes(4) | {99: 1000})
    late = tree_of(("model", [*(layer(f"layer {n}", n) for n in range(4)), 99]), sizes(4) | {99: 1000})
    blocks = {f"layer {number}" for number in range(4)}
    assert least(early, blocks, 1.0)[0] == 1000 + 3 * 10 + 50 + 1
    assert least(late, blocks, 1.0)[0] == 1000 + 4 * 10
