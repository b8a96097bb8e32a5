# SPDX-License-Identifier: Apache-2.0
"""A Mask from its plan to compiled code: when the plan is made, copies, pickles, pytrees, data loaders, traces."""

import copy
import pickle

import pytest
import torch
from flashmask import Mask, masks
from flashmask.torch.mask import as_mask
from mask_cases import bounds_of
from torch.utils import _pytree as pytree

# --- The plan ---------------------------------------------------------------------------------------------


def test_plan_is_made_once(calls):
    mask = masks.causal_document(seqlens=[2, 3])
    assert mask.plan() is mask.plan() is mask.plan("cpu") and calls == [mask]
    assert mask.replace().plan() is not mask.plan() and len(calls) == 2


def test_plan_of_a_mask_without_tensors_needs_a_device(calls):
    mask = masks.causal(4)
    assert mask.device is None
    with pytest.raises(ValueError, match="say which one its plan is for"):
        mask.plan()
    assert mask.plan("cpu") is mask.plan(torch.device("cpu")) and len(calls) == 1
    with pytest.raises(ValueError, match="the mask is on cpu and its plan was asked for on meta"):
        masks.document(seqlens=[1, 2]).plan("meta")


@pytest.mark.parametrize("part", ["bounds", "block_mask"])
def test_a_change_in_place_is_noticed(calls, part):
    mask = Mask(5, 5, bounds=bounds_of(2, keys=5), block_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool))
    getattr(mask, part).zero_()  # before the first plan nothing depends on it
    mask.plan()
    getattr(mask, part)[0, 0, 0, 0] = 0
    with pytest.raises(RuntimeError, match="changed in place after its plan was made"):
        mask.plan()
    mask.replace().plan()
    assert len(calls) == 2


def test_the_tensor_of_the_caller_is_the_masks(calls):
    bounds = bounds_of(1, keys=5)
    mask = as_mask(bounds, seqlen_q=5, seqlen_k=5, causal=True)
    mask.plan()
    bounds.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        mask.plan()


def test_plans_in_inference_mode(calls):
    with torch.inference_mode():
        mask = masks.causal_document(seqlens=torch.tensor([2, 3]))
        assert mask.plan() is mask.plan()
    assert mask.plan() is mask.plan() and len(calls) == 1 and not mask.plan().is_inference()


def test_the_plan_of_a_trace_is_not_kept(calls):
    from torch._subclasses.fake_tensor import FakeTensorMode

    mask = masks.causal(4)
    with FakeTensorMode():
        assert type(mask.plan("cpu")) is not torch.Tensor
    assert type(mask.plan("cpu")) is torch.Tensor


# --- Travelling ---------------------------------------------------------------------------------------------


def both_tensors():
    return Mask(
        130,
        140,
        bounds=torch.randint(0, 130, (2, 1, 140, 2), dtype=torch.int32),
        window=(4, 9),
        q_offset=3,
        block_mask=torch.tensor([[1, 0], [1, 1]], dtype=torch.uint8)[None, None],
    )


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(4, 6),
        masks.causal_document(seqlens=[3, 4]),
        masks.causal(9).replace(block_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool)),
        both_tensors(),
    ],
)
def test_pytree(mask):
    leaves, spec = pytree.tree_flatten({"mask": mask, "x": 1})
    assert [x for x in leaves if isinstance(x, torch.Tensor)] == [
        x for x in (mask.bounds, mask.block_mask) if x is not None
    ]
    again = pytree.tree_unflatten(leaves, spec)["mask"]
    assert isinstance(again, Mask) and again.bounds is mask.bounds and again.block_mask is mask.block_mask
    assert torch.equal(again.to_dense(), mask.to_dense()) and pytree.tree_structure(again) == pytree.tree_structure(
        mask
    )
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(mask)[0]]
    assert paths == [name for name in (".bounds", ".block_mask") if getattr(mask, name[1:]) is not None]


def test_pytree_structures_differ_by_what_is_not_a_tensor():
    structure = pytree.tree_structure(masks.causal(4))
    assert structure == pytree.tree_structure(masks.causal(4)) != pytree.tree_structure(masks.causal(5))


def test_moves():
    mask = both_tensors()
    assert mask.to("cpu") is mask and mask.cpu() is mask and masks.causal(3).to("meta").device is None
    moved = mask.to("meta")
    assert (
        moved.device.type == "meta"
        and moved.window == mask.window
        and moved.q_offset == 3
        and tuple(moved.block_mask.shape) == (1, 1, 2, 2)
    )


def test_copies_and_pickles(calls):
    mask = both_tensors()
    mask.plan()
    for again in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
        assert torch.equal(again.to_dense(), mask.to_dense()) and again.bounds is not mask.bounds
        assert again.plan() is not mask.plan()


def test_a_saved_mask_is_loaded_as_data_alone(tmp_path, calls):
    """torch.load's default since 2.6: what is not registered is refused."""
    file = tmp_path / "batch.pt"
    for mask in (both_tensors(), masks.causal_document(seqlens=[3, 4]), masks.causal(5)):
        mask.plan("cpu")
        torch.save({"mask": mask, "x": torch.ones(2)}, file)
        again = torch.load(file, weights_only=True)["mask"]
        assert isinstance(again, Mask) and torch.equal(again.to_dense(), mask.to_dense())
        assert again.plan("cpu") is not mask.plan("cpu")


def test_positions_are_checked(tmp_path):
    """By the constructor, which replace() and a file go through."""
    good = torch.zeros(1, 5, dtype=torch.int32)
    for given, error, text in (
        ({"q_pos": good}, ValueError, "k_pos is None and q_pos is given"),
        ({"k_pos": good}, ValueError, "q_pos is None and k_pos is given"),
        ({"q_pos": [[0] * 5], "k_pos": good}, TypeError, "q_pos is a list; it must be a tensor"),
        ({"q_pos": good, "k_pos": good.long()}, TypeError, r"k_pos is torch.int64 \[1, 5\]; it must be int32 \[batch"),
        ({"q_pos": good[0], "k_pos": good}, ValueError, r"q_pos is \[5\]; it must be int32 \[batch or 1, 5\]"),
        ({"q_pos": good, "k_pos": good[:, :4]}, ValueError, r"k_pos is \[1, 4\]"),
        ({"q_pos": good.expand(2, 5), "k_pos": good.expand(3, 5)}, ValueError, "batch of q_pos is 2 and of k_pos 3"),
        ({"q_pos": good, "k_pos": good.to("meta")}, ValueError, "q_pos is on cpu and k_pos is on meta"),
        ({"q_pos": good, "k_pos": good, "q_offset": 0}, ValueError, "q_offset is 0; it must be None with q_pos"),
    ):
        with pytest.raises(error, match=text):
            Mask(5, 5, **given)
        with pytest.raises(error, match=text):
            masks.causal(5).replace(**given)
        with pytest.raises(error, match=text):
            object.__new__(Mask).__setstate__({**masks.causal(5).__getstate__(), **given})
    file, mask = tmp_path / "mask.pt", Mask(5, 5, causal=True, q_pos=good, k_pos=good)
    torch.save(mask, file)
    assert torch.equal(torch.load(file, weights_only=True).q_pos, good) and mask.to_dense().all()


def test_positions_of_a_plan_do_not_change(calls):
    positions = torch.zeros(1, 5, dtype=torch.int32)
    mask = Mask(5, 5, causal=True, q_pos=positions, k_pos=positions.clone())
    mask.plan("cpu")
    positions += 1
    with pytest.raises(RuntimeError, match="changed in place"):
        mask.plan("cpu")


def test_what_a_file_says_is_checked(tmp_path):
    mask = masks.causal_document(seqlens=[3, 4])
    state = {**mask.__getstate__(), "seqlen_k": 6}
    with pytest.raises(ValueError, match="it has 7 columns, but there are 6 keys"):
        object.__new__(Mask).__setstate__(state)
    older = {**mask.__getstate__(), "_plans": {}}
    again = object.__new__(Mask)
    again.__setstate__(older)
    assert torch.equal(again.to_dense(), mask.to_dense())


def test_a_mask_taken_apart_and_put_together_keeps_its_plan(calls):
    """Mimics a wrapper of every layer that casts the floating-point tensors of its arguments."""
    for mask in (both_tensors(), masks.causal_document(seqlens=[3, 4]), masks.causal(5)):
        calls.clear()
        cast = lambda x: x.half() if torch.is_floating_point(x) else x
        for _ in range(3):
            again = pytree.tree_map_only(torch.Tensor, cast, {"mask": mask, "x": torch.ones(2)})["mask"]
            assert again is not mask and again.plan("cpu") is mask.plan("cpu")
        assert len(calls) == 1
    pytree.tree_map(lambda x: x, mask.replace(window=(1, 1))).plan("cpu")
    assert len(calls) == 2


def test_a_mask_put_together_of_other_tensors_has_a_plan_of_its_own(calls):
    mask = both_tensors()
    mask.plan()
    leaves, spec = pytree.tree_flatten(mask)
    assert pytree.tree_unflatten([x.clone() for x in leaves], spec).plan() is not mask.plan()
    assert pytree.tree_map(lambda x: x[:, :, :0], mask)._plans is not mask._plans
    structure = pytree.tree_structure(mask)
    calls.clear()
    del mask
    assert not pytree.tree_unflatten(leaves, structure)._plans  # the first one's are not kept


def test_a_change_in_place_is_noticed_after_a_tree_map(calls):
    mask = both_tensors()
    mask.plan()
    again = pytree.tree_map(lambda x: x, mask)
    mask.bounds.zero_()
    with pytest.raises(RuntimeError, match="changed in place after its plan was made"):
        again.plan()


def collated(lengths):
    """A batch as a collate function makes it."""
    return {"x": torch.tensor(lengths), "mask": masks.causal_document(seqlens=lengths), "block": both_tensors()}


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_a_data_loader(workers):
    lengths = [[3, 4], [5, 2]]
    batches = list(torch.utils.data.DataLoader(lengths, batch_size=None, collate_fn=collated, num_workers=workers))
    for batch, wanted in zip(batches, lengths, strict=True):
        assert torch.equal(
            batch["mask"].to("cpu", non_blocking=True).to_dense(), masks.causal_document(seqlens=wanted).to_dense()
        )
        assert batch["block"].window == (4, 9) and batch["block"].block_mask.dtype == torch.uint8


def test_pinned_memory(monkeypatch):
    """A DataLoader pins every tensor of a mask, and only these."""
    from torch.utils.data._utils.pin_memory import pin_memory

    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x, *device: pinned.append(x) or x.clone())
    mask = both_tensors()
    again = pin_memory({"mask": mask})["mask"]
    assert len(pinned) == 2 and pinned[0] is mask.bounds and pinned[1] is mask.block_mask
    assert again.bounds is not mask.bounds and torch.equal(again.to_dense(), mask.to_dense())
    assert masks.causal(3).pin_memory().seqlen_q == 3 and len(pinned) == 2


# --- Compiled code ------------------------------------------------------------------------------------------


def weights(mask, x):
    return x.masked_fill(~mask.to_dense()[0, 0], 0).sum(-1)


def counting_backend():
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    return CompileCounter()


def test_compiled_code_takes_masks_of_any_contents_and_length():
    counter = counting_backend()
    compiled = torch.compile(weights, fullgraph=True, backend=counter)
    for n in range(4):
        mask = masks.causal_document(seqlens=[3, n, 5], seqlen=12)
        x = torch.rand(12, 12)
        assert torch.equal(compiled(mask, x), weights(mask, x))
    assert counter.frame_count == 1
    for length in (13, 14, 20):
        mask, x = masks.causal_document(seqlens=[3, 5], seqlen=length), torch.rand(length, length)
        assert torch.equal(compiled(mask, x), weights(mask, x))
    assert counter.frame_count == 2  # the second one takes any length


def test_compiled_code_does_not_care_whether_there_is_a_plan(calls):
    counter = counting_backend()
    compiled = torch.compile(weights, fullgraph=True, backend=counter)
    mask, x = masks.causal(6).replace(bounds=bounds_of(1)), torch.rand(6, 6)
    compiled(mask, x)
    mask.plan()
    compiled(mask, x)
    assert counter.frame_count == 1


def test_compiled_code_makes_masks():
    counter = counting_backend()

    def build(cu_seqlens, x):
        mask = masks.causal_document(cu_seqlens, seqlen=x.shape[0])
        return mask.replace(window=(4, 0)), weights(mask, x)

    compiled = torch.compile(build, fullgraph=True, backend=counter)
    for length in (13, 14, 15):
        x, cu_seqlens = torch.rand(length, length), torch.tensor([0, 3, 5 + length // 2, length - 1])
        (mask, got), (want_mask, want) = compiled(cu_seqlens, x), build(cu_seqlens, x)
        assert isinstance(mask, Mask) and torch.equal(mask.to_dense(), want_mask.to_dense()) and torch.equal(got, want)
    assert counter.frame_count == 2


def test_compiled_code_raises_the_same_errors():
    compiled = torch.compile(lambda x: as_mask(x, seqlen_q=4, seqlen_k=6), fullgraph=True, backend="eager")
    torch._dynamo.reset()
    with pytest.raises(Exception, match="accepted are|dimensions"):
        compiled(bounds_of(2)[0])
