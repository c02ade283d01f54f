"""The chunked head against plain cross-entropy."""

import pytest
import torch
from torch.nn import functional

from finetune.data.batches import pad
from finetune.engine import loss_head
from finetune.engine.loss import summed_cross_entropy
from finetune.engine.loss_head import chunks, head_loss_per_target, summed_head_loss
from tests.rounding import relative_difference
from tests.tiny_models import build_tiny, tiny_examples, tiny_phi3_config

LARGE_VOCABULARIES = pytest.mark.parametrize("vocabulary", [49_152, 200_064])
ONE_CHUNK = pytest.mark.parametrize("_chunks_of", [100], indirect=True)


@pytest.fixture(params=[1, 2, 100], autouse=True)
def _chunks_of(request, monkeypatch):
    """All in one chunk, in full chunks with a rest, one by one."""
    monkeypatch.setattr(loss_head, "MIN_CHUNK_ROWS", request.param)
    monkeypatch.setitem(loss_head.CHUNK_BYTES, "cpu", 0)


def some_head(*, targets=5, features=4, vocabulary=7, bias=True, dtype=torch.float64, trained=True):
    torch.manual_seed(0)
    hidden = torch.randn(targets, features, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, features, dtype=dtype, requires_grad=trained)
    bias = torch.randn(vocabulary, dtype=dtype, requires_grad=trained) if bias else None
    return hidden, weight, bias, torch.randint(vocabulary, (targets,))


def plain_loss(hidden, weight, bias, labels, counts=None):
    losses = functional.cross_entropy(functional.linear(hidden, weight, bias).double(), labels, reduction="none")
    return (losses if counts is None else losses * counts).sum()


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_equal_the_plain_form(bias, trained, counted):
    hidden, weight, bias, labels = some_head(bias=bias, trained=trained)
    counts = torch.tensor([1, 257, 2, 1, 0]) if counted else None
    inputs = [part for part in (hidden, weight, bias) if part is not None and part.requires_grad]

    def ours(*_):
        return summed_head_loss(hidden, weight, labels, bias=bias, counts=counts)

    expected, got = plain_loss(hidden, weight, bias, labels, counts), ours()
    torch.testing.assert_close(got, expected)
    for mine, theirs in zip(
        torch.autograd.grad(got / 3, inputs), torch.autograd.grad(expected / 3, inputs), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
    assert torch.autograd.gradcheck(ours, inputs, fast_mode=True)


def test_without_a_gradient_the_losses_are_the_same():
    hidden, weight, bias, labels = some_head()
    single = head_loss_per_target(hidden, weight, labels, bias=bias)
    assert not single.requires_grad
    expected = functional.cross_entropy(functional.linear(hidden, weight, bias), labels, reduction="none")
    torch.testing.assert_close(single, expected.detach())


@ONE_CHUNK
def test_the_losses_of_many_targets_are_added_up_in_float64():
    hidden, weight, bias, labels = some_head(targets=5000, dtype=torch.float32, trained=False)
    single = head_loss_per_target(hidden, weight, labels, bias=bias)
    assert summed_head_loss(hidden, weight, labels, bias=bias) == single.double().sum() != single.sum().double()


def test_very_unlikely_targets_keep_their_loss():
    hidden, weight, _, labels = some_head(bias=False, dtype=torch.float32)
    hidden = hidden.detach() * 500
    expected = plain_loss(hidden, weight, None, labels)
    assert expected > 1000  # a probability of e^-1000 is zero in fp32
    torch.testing.assert_close(summed_head_loss(hidden, weight, labels), expected, rtol=1e-6, atol=0)


def assert_every_probability_counts(loss, gradient, logits, labels):
    """Compare with float64. For these logits, the sum in torch's own softmax is too small by 4e-6 to 4e-5."""
    logits = logits.detach().double().requires_grad_()
    expected = functional.cross_entropy(logits, labels)
    expected.backward()
    assert expected < 2.5  # as of a trained model: the bound grows with the loss
    assert abs(loss - expected) <= 1e-6 * max(1, expected)
    assert relative_difference([gradient], [logits.grad]) <= 1e-6
    assert gradient.double().sum(1).abs().max() <= 1e-6


@ONE_CHUNK
@LARGE_VOCABULARIES
def test_small_probabilities_count_in_a_large_vocabulary(vocabulary):
    logits = torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(0)) * 4
    labels, losses, gradients = logits.argmax(1), [], []
    for row, label in zip(logits, labels, strict=True):
        bias = row.clone().requires_grad_()  # where all else is zero, the logits, and their gradient
        loss = summed_head_loss(torch.zeros(1, 1), torch.zeros(vocabulary, 1), label[None], bias=bias)
        loss.backward()
        losses.append(loss.detach())
        gradients.append(bias.grad / len(labels))
        single = head_loss_per_target(torch.zeros(1, 1), torch.zeros(vocabulary, 1), label[None], bias=row)
        assert single.double().equal(loss.detach()[None])
    assert_every_probability_counts(torch.stack(losses).mean(), torch.stack(gradients), logits, labels)


@ONE_CHUNK
@LARGE_VOCABULARIES
def test_small_probabilities_count_in_the_models_own_forward(vocabulary):
    model = build_tiny(tiny_phi3_config(vocab_size=vocabulary, tie_word_embeddings=False))
    torch.nn.init.normal_(model.get_output_embeddings().weight)  # 16 features: logits vary by 4
    batch = pad(list(tiny_examples(6, shortest=9, longest=9)))
    batch.is_target[:, :-1] = False  # so that no logits depend on a label
    made = []
    model.get_output_embeddings().register_forward_hook(lambda *given: made.append(given[2]))
    with torch.no_grad():
        summed_cross_entropy(model, batch)
    batch.input_ids[:, -1] = labels = made.pop().argmax(1)
    loss = summed_cross_entropy(model, batch)
    (gradient,) = torch.autograd.grad(loss / len(labels), made[0])
    assert_every_probability_counts(loss.detach() / len(labels), gradient, made[0], labels)


def test_a_tied_weight_gets_both_gradients():
    _, weight, _, labels = some_head(bias=False)
    ids = torch.randint(7, (5,))

    def gradient(head):
        (made,) = torch.autograd.grad(head(functional.embedding(ids, weight) ** 2), weight)
        return made

    torch.testing.assert_close(
        gradient(lambda hidden: summed_head_loss(hidden, weight, labels)),
        gradient(lambda hidden: plain_loss(hidden, weight, None, labels)),
    )


def test_no_targets_weigh_nothing():
    hidden, weight, bias, labels = some_head(targets=0)
    loss = summed_head_loss(hidden, weight, labels, bias=bias)
    loss.backward()
    assert loss.item() == 0
    assert loss.dtype == torch.float64
    assert not weight.grad.any()
    assert head_loss_per_target(hidden, weight, labels, bias=bias).shape == (0,)


def test_bf16_comes_close_and_keeps_its_types():
    hidden, weight, bias, labels = (
        part.detach().bfloat16().requires_grad_() if part.is_floating_point() else part
        for part in some_head(targets=50, features=16, vocabulary=40, dtype=torch.float32)
    )
    loss = summed_head_loss(hidden, weight, labels, bias=bias)
    loss.backward()
    wide = [part.detach().double().requires_grad_() for part in (hidden, weight, bias)]
    expected = plain_loss(*wide, labels)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=5e-3)
    for mine, exact in zip((hidden, weight, bias), wide, strict=True):
        assert mine.grad.dtype == torch.bfloat16
        assert (mine.grad.double() - exact.grad).norm() < 0.02 * exact.grad.norm()


def test_the_factor_of_a_bf16_gradient_is_not_rounded():
    hidden, weight, _, labels = some_head(targets=50, features=16, vocabulary=40, bias=False, dtype=torch.float32)
    hidden = hidden.detach().bfloat16().requires_grad_()
    loss = summed_head_loss(hidden, weight.detach().bfloat16(), labels)
    (whole,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (part,) = torch.autograd.grad(loss / 771, hidden)  # 1 / 771 lies between two numbers of bf16
    assert part.equal((whole.double() / 771).bfloat16())


@ONE_CHUNK
def test_a_chunk_has_the_rows_that_fit_and_no_fewer_than_pay():
    def sizes(rows, chunk_bytes):
        return [len(range(rows)[chunk]) for chunk in chunks(torch.empty(rows, 1), 1000, chunk_bytes)]

    assert sizes(700, 300 * 1000 * 4) == [300, 300, 100]
    assert sizes(150, 0) == [100, 50]
