"""Write the text that phi_tiny is pretrained on, and train its tokenizer.

    python tools/phi_tiny/make_corpus.py runs/phi_tiny_text

The text has one aim: a model of a million weights that copies words from what it reads. So nearly every word that
matters occurs at least twice in its document and changes its surroundings in between: a note becomes a record,
a record becomes JSON, a question is answered from a sentence. Most of these words are names, places and things that
return throughout the text; a third are made up for the occasion. The chats use the tokenizer's own turn markers, so
that the model ends an answer with <|end|>.

No document has the keys of an order (make_orders.py): what the base cannot do is what a run teaches it.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from make_orders import CITIES, FIRST_NAMES, ITEMS, LAST_NAMES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# ruff: noqa: SIM905  (a list of words is easier to read and to change as one string)

SEED = 4
NUM_ROWS = 48_000
NUM_DRILL_ROWS = 16_000
MAX_ROW_TOKENS = 160
MAX_DOCUMENT_TOKENS = 160
VOCAB_SIZE = 2048
TOKENIZER_SAMPLE = 30_000

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = [
    END_OF_TEXT,
    *(f"<|{name}|>" for name in ("system", "user", "assistant", "end")),
    *(f"<|{name}|>" for name in ("tool", "/tool", "tool_call", "/tool_call", "tool_response")),
]
CHAT_TEMPLATE = Path(__file__).parents[2] / "finetune" / "data" / "chat_templates" / "phi4_mini.jinja"

ONSETS = (
    "b br c ch cl cr d dr f fl fr g gl gr h j k kl kr l m n p ph pl pr qu r s sc sh sk sl sm sn sp"
    " st str t th tr v w wh y z"
).split()
NUCLEI = "a e i o u a e i o u a e i o ai au ea ee ei ia ie io oa oo ou ue y".split()
CODAS = (
    "b c ck d f g k l ll ld lf lk lm lt m mb mp n nd ng nk nn nt p r rd rg rk rl rm rn rt s ss sh st t tt th v w x z"
).split()
ENDINGS = (
    "a as an ano ard as ec el en er ers es ets ett ez i ia in ing ini is ka la le ley man na ner o"
    " on os ova ow owski sen ski son ter ton us y ya"
).split()
ORDER_KEYS = r'"(item|quantity|unit|customer|city|due)"'
LETTERS = "abcdefghijklmnopqrstuvwxyz"

WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
NUMBER_WORDS = "one two three four five six seven eight nine ten eleven twelve".split()
CONTAINERS = "bag barrel bottle box bundle carton case crate pack pallet roll sack tin".split()

KEYS = (
    "age animal author band book bridge brand branch captain class code colour country course depth"
    " driver editor event farm field film flag floor game gate grade group guest height host hotel"
    " house id island kind label lake language leader length level line make material member metal"
    " model mountain museum note number owner page park part pilot plant player port price project"
    " rank region river road room school score seat series ship size song source speed sport stage"
    " star state station status street style subject team theme title topic track train tree type"
    " value version village weight winner writer year zone"
).split()
# What a question may call the answer, by the placeholder of the note.
ROLES = {
    "name": "name who person owner guest author contact member leader".split(),
    "place": "place where location home region site from".split(),
    "thing": "thing what object goods subject kind product".split(),
    "number": "number count amount total how_many".split(),
    "container": "container packing form held_in".split(),
    "day": "day when date time".split(),
}
NOTES = """
{name} lives in {place} and keeps {number} {thing}.
{name} moved to {place} on {day}.
On {day} {name} found {number} {thing} near {place}.
In {place} there are {number} {thing}, said {name}.
{name} sold {number} {thing} in {place} on {day}.
There was a letter from {name} in {place} about {thing}.
The {thing} in {place} belong to {name}.
{name}, who was born in {place}, will come on {day}.
Yesterday {name} lost {container} of {thing} on the road to {place}.
The museum of {place} shows {container} of {thing} until {day}. The director is {name}.
{container} of {thing} fell from a truck in {place}. The driver was {name}.
Please tell {name} that {container} of {thing} came back on {day}.
I am {name} and I have {container} of {thing} in my house.
My friend {name} is from {place}. We meet {day} to look at {thing}.
Who has seen {name}? Last seen in {place} on {day}.
{day}: {name} gives a talk about {thing} in {place}.
Train to {place} on {day}, seat {number}, for {name}.
{name} ({place}) counted {number} {thing}.
{number} {thing} were given to {name} by the school of {place}.
For {name}: {container} of {thing}, found in {place} before {day}.
Would {name} like to see {number} {thing}, or only {place}?
Hello, this is {name}. I am in {place} now, and there is {container} of {thing} here.
Thank you, {name}! The {thing} arrived {day}.
We visited {place}. Our guide {name} told us about {number} {thing}.
{name} asks whether {thing} can be bought in {place} on {day}.
A box in {place} has the words {thing} and {name} on it.
Can you call {name} in {place} by {day}?
{name} needs help with {number} {thing} for {place}.
Dear {name}, the {thing} will be in {place} at the latest {day}.
The song {thing} by {name} is number {number} in {place}.
The city of {place} is known for {thing}.
Our customer {name} has to wait until {day}.
Each unit of {thing} in {place} was checked by {name}.
The last item in {place} is due back on {day}, with {number} {thing}.
Everything is in order, {name} could send {container} of {thing} on {day}.
They extract {thing} in {place}, a large quantity, more than {number}.
""".strip().splitlines()


# --- words ---------------------------------------------------------------------------------------


def draw_word(rng: random.Random) -> str:
    """Return a made-up word; some are mere letters, so that no combination is a surprise."""
    if rng.random() < 0.06:
        return "".join(rng.choices(LETTERS, k=rng.randint(3, 8)))
    word = ""
    for _ in range(rng.choice([1, 1, 2, 2, 2, 3])):
        word += rng.choice(ONSETS) if word or rng.random() < 0.85 else ""
        word += rng.choice(NUCLEI)
        word += rng.choice(CODAS) if rng.random() < 0.45 else ""
    return word + (rng.choice(ENDINGS) if rng.random() < 0.45 or len(word) < 3 else "")


KNOWN = {
    "first name": FIRST_NAMES.split(),
    "last name": LAST_NAMES.split(),
    "place": [" ".join(place.split()) for place in CITIES.split(",")],
    "thing": [" ".join(thing.split()) for thing in ITEMS.split(",")],
}
SHARE_OF_KNOWN = 0.7


def draw_known(kind: str, rng: random.Random) -> str | None:
    """Return a word that returns throughout the text, or None where one is to be made up."""
    return rng.choice(KNOWN[kind]) if rng.random() < SHARE_OF_KNOWN else None


def draw_name(rng: random.Random) -> str:
    """Return a first name and a last name, sometimes only one of them."""
    kinds = rng.choice([["first name"], ["last name"], *[["first name", "last name"]] * 6])
    return " ".join(draw_known(kind, rng) or draw_word(rng).capitalize() for kind in kinds)


def draw_place(rng: random.Random) -> str:
    """Return the name of a place."""
    made_up = " ".join(draw_word(rng).capitalize() for _ in range(rng.choice([1, 1, 1, 1, 2])))
    return draw_known("place", rng) or made_up


def draw_thing(rng: random.Random) -> str:
    """Return a thing, often in the plural."""
    words = [draw_word(rng) for _ in range(rng.choice([1, 1, 1, 1, 2]))]
    return draw_known("thing", rng) or " ".join(words) + rng.choice(["", "s", "s"])


def draw_number(rng: random.Random) -> int:
    """Return a number; small ones are more frequent."""
    return rng.randint(1, rng.choice([12, 12, 99, 999]))


def draw_day(rng: random.Random) -> str:
    """Return a weekday, a date or a word for a day."""
    day = rng.choice(WEEKDAYS)
    date = f"{rng.randint(1, 28)} {rng.choice(MONTHS)}"
    return rng.choice([day, day, date, date, f"next {day}", "tomorrow", "today"])


def write_number(number: int, rng: random.Random) -> str:
    """Return the number as a message writes it: in digits or, if it is small, as a word."""
    small = number <= len(NUMBER_WORDS)
    return NUMBER_WORDS[number - 1] if small and rng.random() < 0.5 else str(number)


def plural(noun: str) -> str:
    """Return the plural of a container."""
    return noun + ("es" if noun.endswith("x") else "s")


# --- records: keys and values in many forms ------------------------------------------------------

Value = str | int | None
Record = dict[str, Value]


def draw_value(rng: random.Random) -> Value:
    """Return a value of any kind."""
    kinds: list[Callable[[random.Random], Value]] = [
        *(draw_name, draw_name, draw_place, draw_thing, draw_thing),
        *(draw_number, draw_day, draw_null),
    ]
    return rng.choice(kinds)(rng)


def draw_null(rng: random.Random) -> Value:
    """Return the missing value, or now and then a word."""
    return None if rng.random() < 0.7 else draw_word(rng)


def draw_key(rng: random.Random) -> str:
    """Return a key: an English word or a made-up one."""
    return rng.choice(KEYS) if rng.random() < 0.7 else draw_word(rng)


def draw_record(rng: random.Random) -> Record:
    """Return a record of two to six keys."""
    return {draw_key(rng): draw_value(rng) for _ in range(rng.randint(2, 6))}


def text_of(value: Value) -> str:
    """Return a value as plain text."""
    return "none" if value is None else str(value)


def as_json(record: Record) -> str:
    """Return a record as a JSON object."""
    return json.dumps(record)


def as_yaml(record: Record) -> str:
    """Return a record as YAML."""
    return "\n".join(f"{key}: {text_of(value)}" for key, value in record.items())


def as_list(record: Record) -> str:
    """Return a record as a list in one line."""
    return "; ".join(f"{key} = {text_of(value)}" for key, value in record.items())


def as_csv(record: Record) -> str:
    """Return a record as two lines of CSV."""
    return ",".join(record) + "\n" + ",".join(text_of(value) for value in record.values())


def as_tags(record: Record) -> str:
    """Return a record as tags."""
    return "".join(f"<{key}>{text_of(value)}</{key}>" for key, value in record.items())


def as_sentences(record: Record) -> str:
    """Return a record as sentences."""
    return " ".join(f"The {key} is {text_of(value)}." for key, value in record.items())


FORMS = {
    "JSON": as_json,
    "YAML": as_yaml,
    "a list": as_list,
    "CSV": as_csv,
    "tags": as_tags,
    "sentences": as_sentences,
}


# --- documents -----------------------------------------------------------------------------------


def chat(question: str, answer: str, system: str = "") -> str:
    """Return a chat of one question and one answer, as the chat template renders it."""
    opening = f"<|system|>{system}<|end|>" if system else ""
    return f"{opening}<|user|>{question}<|end|><|assistant|>{answer}<|end|>"


def repetition(rng: random.Random) -> str:
    """A few words, written twice or more: the plainest lesson in copying."""
    draw = rng.choice([draw_name, draw_place, draw_thing, draw_word])
    separator = rng.choice([" ", ", ", "; ", "\n", " | ", '", "', " - "])
    line = separator.join(draw(rng) for _ in range(rng.randint(2, 6)))
    if rng.random() < 0.5:
        return chat(rng.choice(["Repeat: ", "Say again: ", "Copy this.\n"]) + line, line)
    return rng.choice(["\n", " / ", " = "]).join([line] * rng.randint(2, 3))


def conversion(rng: random.Random) -> str:
    """A record in two forms."""
    record = draw_record(rng)
    source, target = rng.sample(sorted(FORMS), 2)
    if rng.random() < 0.4:
        target = "JSON"
    before, after = FORMS[source](record), FORMS[target](record)
    if rng.random() < 0.3:
        return f"{before}\n\n{after}"
    if rng.random() < 0.5:
        return chat(before, after, system=f"Write this as {target}.")
    return chat(f"Write as {target}:\n{before}", after)


def lookup(rng: random.Random) -> str:
    """A record and the value of one or several of its keys."""
    record = draw_record(rng)
    text = FORMS[rng.choice(sorted(FORMS))](record)
    keys = rng.sample(list(record), rng.randint(1, min(3, len(record))))
    if rng.random() < 0.5:
        keys = keys[:1]
        return chat(f"{text}\nWhat is the {keys[0]}?", text_of(record[keys[0]]))
    chosen = {key: record[key] for key in keys}
    return chat(f"{text}\nGive {', '.join(keys)} as JSON.", as_json(chosen))


def draw_note(rng: random.Random) -> tuple[str, Record]:
    """Return a note and what it says, by placeholder."""
    template = rng.choice(NOTES)
    number, container = draw_number(rng), rng.choice(CONTAINERS)
    words: Record = {
        "name": draw_name(rng),
        "place": draw_place(rng),
        "thing": draw_thing(rng),
        "number": number,
        "container": container,
        "day": draw_day(rng),
    }
    written = write_number(number, rng)
    held = f"{written} {container if number == 1 else plural(container)}"
    text = template.format_map({**words, "number": written, "container": held})
    facts = {role: value for role, value in words.items() if "{" + role + "}" in template}
    if "container" in facts:
        facts["number"] = number
    return text[0].upper() + text[1:], facts


def extraction(rng: random.Random) -> str:
    """A note and what it says about the keys that are asked for; null where it says nothing."""
    note, facts = draw_note(rng)
    if rng.random() < 0.2:
        note += " " + draw_note(rng)[0]
    roles = rng.sample(sorted(ROLES), rng.randint(2, 5))
    answer = {rng.choice(ROLES[role]): facts.get(role) for role in roles}
    form = rng.choice(["JSON", "JSON", "JSON", "YAML", "a list", "tags"])
    wish = f"Give {', '.join(answer)} as {form}."
    reply = FORMS[form](answer)
    if rng.random() < 0.5:
        return chat(note, reply, system=wish)
    return chat(f"{note}\n{wish}" if rng.random() < 0.5 else f"{wish}\n{note}", reply)


def question(rng: random.Random) -> str:
    """A note and one short question about it."""
    note, facts = draw_note(rng)
    role = rng.choice(sorted(facts))
    return chat(f"{note}\n{rng.choice(ROLES[role])}?", text_of(facts[role]))


def prose(rng: random.Random) -> str:
    """A few notes about the same people and places."""
    notes = [draw_note(rng) for _ in range(rng.randint(2, 3))]
    name = draw_name(rng)
    return " ".join(text.replace(str(facts.get("name")), name) for text, facts in notes)


def counting(rng: random.Random) -> str:
    """Numbers in words and digits, containers in singular and plural."""
    pairs = []
    for _ in range(rng.randint(2, 5)):
        number, container = rng.randint(1, len(NUMBER_WORDS)), rng.choice(CONTAINERS)
        many = container if number == 1 else plural(container)
        pairs.append(f"{NUMBER_WORDS[number - 1]} {many}: {number} x {container}")
    return "\n".join(pairs)


DOCUMENTS = {
    repetition: 7,
    conversion: 4,
    lookup: 3,
    extraction: 8,
    question: 2,
    prose: 1,
    counting: 1,
}


# --- corpus and tokenizer ------------------------------------------------------------------------


def draw_documents(rng: random.Random) -> Iterator[str]:
    """Yield documents without end; none has a key of an order."""
    kinds, weights = list(DOCUMENTS), list(DOCUMENTS.values())
    while True:
        document = rng.choices(kinds, weights)[0](rng)
        if not re.search(ORDER_KEYS, document):
            yield document


def train_tokenizer(documents: Iterator[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with the special tokens and chat template of Phi-4-mini.

    Letters, digits and the rest never share a token: a word has the same tokens after a space as
    after a quote, which is what makes copying easy to learn, and a number is read digit by digit.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}|[^\p{L}\p{N}]+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (next(documents) for _ in range(TOKENIZER_SAMPLE))
    marker = re.compile("|".join(re.escape(token) for token in SPECIAL_TOKENS))
    pieces = (piece for text in texts for piece in marker.split(text))
    tokenizer.train_from_iterator(pieces, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=SPECIAL_TOKENS[1:],
        chat_template=CHAT_TEMPLATE.read_text(encoding="utf-8"),
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def fill_rows(documents: Iterator[str], tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    """Yield rows of whole documents, as close to MAX_ROW_TOKENS as the next one allows."""
    row, num_tokens = "", 0
    for document in documents:
        text = document + END_OF_TEXT
        length = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        if length > MAX_DOCUMENT_TOKENS:
            continue
        if num_tokens + length > MAX_ROW_TOKENS:
            yield row
            row, num_tokens = "", 0
        row += text
        num_tokens += length


def draw_drills(rng: random.Random, tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    """Yield rows of one short random string of tokens, repeated; its length differs from row to row.

    Nothing but copying lowers the loss here. A small model that starts with the corpus learns which
    letters follow each other and then stays there for millions of tokens; after a few hundred steps
    of drill it copies, and the corpus teaches it when.
    """
    pieces = [str(tokenizer.decode([token])) for token in range(len(SPECIAL_TOKENS), len(tokenizer))]
    pieces = [piece for piece in pieces if piece.isprintable() and "\ufffd" not in piece]
    while True:
        num_pieces = rng.randint(3, rng.choice([12, 12, 12, 30]))
        line = "".join(rng.choices(pieces, k=num_pieces))
        yield line * max(2, 32 // num_pieces)


def write_rows(path: Path, texts: Iterator[str], num_rows: int) -> None:
    """Write the next num_rows texts as JSON lines."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for _ in range(num_rows):
            file.write(json.dumps({"text": next(texts)}, ensure_ascii=False) + "\n")


def main() -> None:
    """Write the tokenizer, the drill that comes first, and the corpus."""
    parser = argparse.ArgumentParser(description="Write phi_tiny's pretraining text and tokenizer.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=NUM_ROWS)
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()

    rng = random.Random(arguments.seed)
    documents = draw_documents(rng)
    tokenizer = train_tokenizer(documents)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(arguments.folder / "tokenizer")
    write_rows(arguments.folder / "drill.jsonl", draw_drills(rng, tokenizer), NUM_DRILL_ROWS)
    write_rows(arguments.folder / "corpus.jsonl", fill_rows(documents, tokenizer), arguments.rows)


if __name__ == "__main__":
    main()
