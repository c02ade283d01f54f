"""Generated answers against the expected ones: what is asked, what was expected, and the measures that are shipped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from finetune.data.encoded import EncodedExamples
from finetune.data.templates import stop_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Metric = Callable[[str, str], float]
"""(generated answer, expected answer) to a number. The figure of a model is the mean over the rows."""


def exact_match(answer: str, expected: str) -> float:
    """1 where both are the same but for white space around them."""
    return float(answer.strip() == expected.strip())


def json_valid(answer: str, expected: str) -> float:
    """1 where the answer is a JSON object or array; a bare number or word is an answer, not a document."""
    return float(isinstance(_parsed(answer), (dict, list)))


def json_equal(answer: str, expected: str) -> float:
    """1 where both are JSON documents that say the same, whatever the order of keys and the spacing."""
    found = _parsed(answer)
    return float(isinstance(found, (dict, list)) and found == _parsed(expected))


def token_f1(answer: str, expected: str) -> float:
    """Harmonic mean of precision and recall over words, as SQuAD counts them (Rajpurkar et al., arXiv:1606.05250).

    Words are split at white space and compared in lower case; SQuAD's removal of articles is left out, as it is
    for English alone.
    """
    found, wanted = answer.lower().split(), expected.lower().split()
    common = (Counter(found) & Counter(wanted)).total()
    if not found or not wanted:
        return float(found == wanted)
    return 2 * common / (len(found) + len(wanted))


METRICS: Mapping[str, Metric] = {
    "exact_match": exact_match,
    "json_valid": json_valid,
    "json_equal": json_equal,
    "token_f1": token_f1,
}
SHARES = frozenset({"exact_match", "json_valid", "json_equal"})
"""Those that are shares of the rows."""


def text_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Tokens as text without special tokens, and without white space around it."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True)).strip()


class Dialogues:
    """Prompt and expected answer of each row that has an answer to generate.

    Args:
        examples: encoded rows; those of plain text have no answers.
        tokenizer: the model's.

    Attributes:
        sources: where each row was read.
        prompts: token ids, the header of the assistant's turn included.
        expected: what the assistant says, as text.
    """

    def __init__(self, examples: EncodedExamples, tokenizer: PreTrainedTokenizerBase) -> None:
        rows = [] if examples.kind == "text" else examples.num_targets.nonzero()[:, 0].tolist()
        pairs = [examples.prompt_and_answer(row) for row in rows]
        self.sources = [examples.source(row) for row in rows]
        self.prompts = [list(map(int, prompt)) for prompt, _ in pairs]
        self.expected = [text_of(tokenizer, answer) for _, answer in pairs]
        self._tokenizer = tokenizer

    def last_turn(self, row: int) -> str:
        """What the last turn before the answer says, without the tokens around it; all of a prompt without turns."""
        prompt = self.prompts[row]
        special = set(self._tokenizer.all_special_ids)
        end_of_turn = stop_ids(self._tokenizer, None)[0]
        ends = [position for position, token in enumerate(prompt) if token == end_of_turn]
        end = start = ends[-1] if ends else len(prompt)
        while start > 0 and prompt[start - 1] not in special:
            start -= 1
        return text_of(self._tokenizer, prompt[start:end])


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
