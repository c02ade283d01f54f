"""An embedding in main memory, for a device that has no room for it (`training.memory=least`)."""

from __future__ import annotations

from typing import Any

import torch

from finetune.engine.decoder import bare_model


class HostEmbedding(torch.nn.Embedding):
    """An embedding whose weight stays in main memory. The device gets only the rows of a micro-batch's tokens."""

    is_on_host = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Look the tokens up in main memory, and return their rows on the device of the token ids."""
        return super().forward(input.to(self.weight.device)).to(input.device)


def embedding_that_may_leave(model: Any) -> torch.nn.Parameter | None:
    """Return the embedding's weight if `keep_embedding_on_host` can take it off the device, else None.

    It must be frozen, a part of the decoder itself, of torch's own class, and not the head as well: the head multiplies
    with all of its rows.
    """
    bare = bare_model(model)
    embedding, head = bare.get_input_embeddings(), bare.get_output_embeddings()
    if type(embedding) is not torch.nn.Embedding or embedding not in bare.get_decoder().children():
        return None
    weight: Any = embedding.weight
    return None if weight.requires_grad or weight is head.weight else weight


def keep_embedding_on_host(model: Any) -> None:
    """Keep an embedding for which `embedding_that_may_leave` returns the weight in main memory."""
    embedding, children = bare_model(model).get_input_embeddings(), bare_model(model).get_decoder()._modules
    embedding.__class__ = HostEmbedding
    # transformers looks at a model's first weight to find its device. So the embedding moves behind the layers.
    name = next(name for name, module in children.items() if module is embedding)
    children[name] = children.pop(name)
    if not embedding.weight.is_meta:
        embedding.weight.data = embedding.weight.data.cpu()
