"""Make the shipped sums: prompts with their results, and conversations that seldom call a calculator.

    python tools/phi_tiny/make_sums.py [FOLDER]

The conversations are for a short supervised run, which learns the form of a call, and to guess. The prompts are for
learning from rewards.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from transformers.utils.chat_template_utils import get_json_schema

from finetune.training.rewards.tool_process import calculator

_SPLITS = {"train": 1000, "validation": 100}
_CONVERSATIONS, _SHARE_OF_CALLS = 300, 0.35


def make_expression(dice: random.Random) -> str:
    """Return a sum of two or three numbers."""
    numbers = [str(dice.randint(10, 999)) for _ in range(dice.choice((2, 2, 3)))]
    return numbers[0] + "".join(f" {dice.choice('+-*')} {number}" for number in numbers[1:])


def make_conversation(expression: str, dice: random.Random) -> dict[str, object]:
    """Return a conversation in which the calculator is called, or more often one in which the answer is guessed."""
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": expression}}}
    result = str(calculator(expression))
    called = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result},
    ]
    guessed = [{"role": "assistant", "content": f"About {dice.randint(100, 9999)}"}]
    answers = called if dice.random() < _SHARE_OF_CALLS else guessed
    question = {"role": "user", "content": f"What is {expression}?"}
    return {"messages": [question, *answers], "tools": [get_json_schema(calculator)]}


def main() -> None:
    """Write the files."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "finetune/assets")
    dice = random.Random(7)
    expressions = list(
        dict.fromkeys(make_expression(dice) for _ in range(2 * (sum(_SPLITS.values()) + _CONVERSATIONS)))
    )
    (folder / "sums").mkdir(parents=True, exist_ok=True)
    files = {"calls.jsonl": [make_conversation(expressions.pop(), dice) for _ in range(_CONVERSATIONS)]}
    for split, count in _SPLITS.items():
        chosen = [expressions.pop() for _ in range(count)]
        files[f"sums/{split}.jsonl"] = [
            {"prompt": f"What is {each}?", "completion": str(calculator(each))} for each in chosen
        ]
    for name, rows in files.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
