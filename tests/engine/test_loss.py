import pytest
import torch
from torch.nn import functional

from finetune.data.batches import pad
from finetune.data.encoded import EncodedExamples
from finetune.engine.layout import pack
from finetune.engine.loss import cross_entropy_per_target, summed_cross_entropy
from finetune.engine.padded import PaddedMicrobatch
from finetune.engine.supported import unsupported_reason
from tests.rounding import relative_difference
from tests.tiny_models import build_tiny, tiny_examples, tiny_gemma2_config, tiny_phi3_config, tiny_phi_config

CONFIGS = {
    "phi": tiny_phi_config(),
    "phi3": tiny_phi3_config(),
    "gemma2": tiny_gemma2_config(),  # not among the plain heads: it caps its logits
}


@pytest.fixture(params=CONFIGS)
def model(request):
    return build_tiny(CONFIGS[request.param])


@pytest.fixture
def batch():
    return pad(list(tiny_examples(5)))


def plain_loss(model, batch):
    """What the model's own forward gives, with all logits and an attention mask."""
    assert batch.num_tokens < batch.input_ids.numel(), "the rows should differ in length"
    mask = torch.zeros_like(batch.input_ids)
    for row, ids in enumerate(batch.input_ids):
        mask[row, : int(ids.nonzero().max()) + 1] = 1  # no row of the test holds token 0
    logits = model(input_ids=batch.input_ids, attention_mask=mask, use_cache=False).logits
    labels = batch.input_ids.masked_fill(~batch.is_target, -100)
    return functional.cross_entropy(
        logits[:, :-1].double().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )


def gradients(model):
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def test_loss_and_gradients_equal_the_models_own_forward(model, batch):
    ours = summed_cross_entropy(model, batch)
    ours.backward()
    our_gradients = gradients(model)
    theirs = plain_loss(model, batch)
    theirs.backward()
    their_gradients = gradients(model)

    assert ours.dtype == torch.float64
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    assert our_gradients.keys() == their_gradients.keys()
    assert relative_difference(our_gradients.values(), their_gradients.values()) <= 1e-5


def test_the_temperature_divides_the_logits_and_so_the_bias_of_the_head(model, batch):
    rows = list(tiny_examples(5))
    if (bias := model.get_output_embeddings().bias) is not None:
        torch.nn.init.normal_(bias)
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids, use_cache=False).logits[:, :-1]
    nats = functional.cross_entropy((logits / 0.5).transpose(1, 2), batch.input_ids[:, 1:], reduction="none")
    expected = nats[batch.is_target[:, 1:]]
    torch.testing.assert_close(cross_entropy_per_target(model, batch, temperature=0.5).detach(), expected)
    if unsupported_reason(model) is None:
        torch.testing.assert_close(cross_entropy_per_target(model, pack(rows), temperature=0.5), expected)


def test_a_row_has_the_same_loss_and_gradient_alone_and_padded(model):
    examples = list(tiny_examples(4, shortest=3, longest=24))
    together = cross_entropy_per_target(model, pad(examples)).sum()
    together.backward()
    padded = gradients(model)
    single = sum(cross_entropy_per_target(model, pad([example])).sum() for example in examples)
    single.backward()

    assert together.item() == pytest.approx(single.item(), rel=1e-6)
    assert relative_difference(padded.values(), gradients(model).values()) <= 1e-5


def test_what_stands_behind_a_rows_end_does_not_matter(model, batch):
    other = batch.input_ids.clone()
    other[batch.input_ids == 0] = 33
    changed = PaddedMicrobatch(
        input_ids=other, is_target=batch.is_target, num_tokens=batch.num_tokens, num_targets=batch.num_targets
    )
    assert torch.equal(cross_entropy_per_target(model, batch), cross_entropy_per_target(model, changed))


def test_targets_come_row_after_row(model):
    examples = list(tiny_examples(3))
    rows = [cross_entropy_per_target(model, pad([example])) for example in examples]
    together = cross_entropy_per_target(model, pad(examples))
    assert [len(row) for row in rows] == [int(example.is_target.sum()) for example in examples]
    torch.testing.assert_close(together, torch.cat(rows), rtol=1e-5, atol=1e-5)


def test_a_micro_batch_without_targets_weighs_nothing(model):
    empty = EncodedExamples.from_rows([([5, 6, 7], [False] * 3), ([8, 9], [False] * 2)], end_id=2)
    loss = summed_cross_entropy(model, pad(list(empty)))
    loss.backward()
    assert loss.item() == 0
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert found
    assert not any(gradient.any() for gradient in found)


def test_a_model_whose_forward_has_no_logits_to_keep_is_read_whole(batch):
    model = build_tiny(tiny_gemma2_config())
    expected = plain_loss(model, batch).item()
    theirs = model.forward
    model.forward = lambda input_ids, use_cache: theirs(input_ids=input_ids, use_cache=use_cache)
    assert summed_cross_entropy(model, batch).item() == pytest.approx(expected, rel=1e-6)
