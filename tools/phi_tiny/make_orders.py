"""Write the orders data set: short order messages and the JSON object each one asks for.

    python tools/phi_tiny/make_orders.py [FOLDER]

Every row is a chat of three turns, as a user would have it in a file of their own. The names,
cities and items of the validation and test splits never occur in the training split, so a model
scores well there only by copying from the message in front of it. Small closed classes (units,
weekdays, months, number words) are shared.

The script is a function of its seed: the same seed writes the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from dataclasses import asdict, dataclass
from pathlib import Path

# ruff: noqa: SIM905  (a list of words is easier to read and to change as one string)

SEED = 20
NUM_ROWS = {"train": 2000, "validation": 200, "test": 200}
SHARE_OF_WORDS = {"train": 0.72, "validation": 0.1, "test": 0.18}
SYSTEM_PROMPT = "Extract the order as JSON."

FIRST_NAMES = """
Adela Agnes Aldo Alice Amara Amir Anders Anita Arjun Astrid Aurora Beatriz Bianca Boris Bruno
Camila Carmen Cedric Chiara Clara Conrad Dalia Damian Daria Dmitri Dolores Edgar Elena Elias Emeka
Enzo Erika Esther Fabian Farah Felix Fiona Flora Frida Gareth Gemma Giulia Greta Gustav Hamza Hanna
Harriet Hector Helga Hiro Hugo Ibrahim Ines Ingrid Irene Isaac Ivana Jasper Joana Jonas Judith
Julian Kamal Karin Keiko Kofi Lars Laura Leila Leon Lidia Linus Lorena Lucas Luisa Magda Malik
Marco Marta Matteo Maya Milan Miriam Mona Nadia Naomi Nelson Nikolai Nora Olga Omar Oscar Pablo
Paula Pedro Petra Priya Quentin Rafael Ramona Renata Rita Robert Rosa Ruben Sabine Samuel Sara
Selma Simon Sonja Stefan Sunita Tamara Tariq Teresa Thomas Tobias Ulrich Ursula Valentina Vera
Victor Wanda Wilma Xavier Yara Yusuf Zelda
"""
LAST_NAMES = """
Abbott Acosta Almeida Andersen Aziz Bailey Banerjee Barbosa Becker Bergman Bianchi Blanco Bosch
Brandt Castro Cohen Costa Craig Dalton Delgado Dubois Duarte Eriksen Esposito Farrell Ferrari
Fischer Fleming Fonseca Fraser Galindo Garcia Gomez Greco Grimaldi Gupta Haddad Hansen Harper
Hayashi Heller Herrera Hoffman Holm Hussain Ibarra Ivanov Jansen Jensen Joshi Kaplan Kaur Keller
Khan Kimura Klein Koch Kovacs Kowalski Kramer Lange Larsen Leblanc Lindgren Lombardi Lopez Lund
Maier Marino Martel Mendes Meyer Molina Moreau Moreno Mori Mwangi Nair Navarro Neumann Nguyen Novak
Okafor Oliveira Orlov Ortega Osman Patel Pereira Petrov Pinto Popescu Quinn Ramos Reyes Richter
Rivera Rossi Ruiz Salazar Santos Schmidt Serrano Sharma Silva Sokolov Sorensen Suzuki Tanaka
Teixeira Torres Ueda Vargas Vasquez Vogel Wagner Walsh Weber Winkler Wojcik Yamada Young Zapata
Ziegler Zimmer
"""
CITIES = """
Aarhus, Aberdeen, Accra, Almeria, Ankara, Antwerp, Athens, Bangkok, Basel, Belfast, Bergen, Berlin,
Bilbao, Bogota, Bologna, Bordeaux, Boston, Bremen, Brno, Budapest, Cadiz, Cairo, Calgary, Cape
Town, Cardiff, Chennai, Chicago, Cologne, Cordoba, Cork, Dakar, Dallas, Delhi, Denver, Dresden,
Dublin, Durban, El Paso, Florence, Galway, Geneva, Genoa, Ghent, Glasgow, Granada, Graz, Haifa,
Hamburg, Hanoi, Havana, Helsinki, Houston, Istanbul, Jakarta, Karachi, Kiel, Krakow, Kyoto, Lagos,
Leeds, Leipzig, Lille, Lima, Lisbon, Liverpool, Ljubljana, London, Lyon, Madrid, Malmo, Manila,
Marseille, Memphis, Milwaukee, Montreal, Mumbai, Munich, Nairobi, Nantes, Naples, New York, Nice,
Odense, Osaka, Oslo, Ottawa, Oxford, Palermo, Paris, Perth, Pisa, Porto, Prague, Quito, Reykjavik,
Riga, Rome, Rotterdam, San Diego, Santiago, Seattle, Seoul, Seville, Stockholm, Sydney, Tallinn,
Tampere, Tokyo, Toledo, Toronto, Trieste, Tunis, Turin, Utrecht, Valencia, Vancouver, Venice,
Verona, Vienna, Vilnius, Warsaw, Zagreb, Zurich
"""
# A plural can be ordered without a unit ("3 lamps"), anything else only in one ("3 bags of rice").
ITEMS = """
almonds, anchors, apples, apricots, axes, bandages, barley, batteries, beans, bearings, blankets,
bolts, bricks, brooms, brushes, buckets, bulbs, butter, buttons, cables, candles, carrots, cashews,
cement, chains, chairs, cherries, chisels, clamps, clay, coal, cocoa, coffee, copper wire, corks,
cotton, cups, curtains, dates, desks, drills, eggs, envelopes, fans, feathers, figs, filters,
flour, forks, frozen peas, fuses, garlic, gaskets, ginger, glue, gravel, green tea, hammers,
helmets, hinges, hooks, honey, hoses, ink, kettles, keyboards, lamps, lemons, lentils, lids, lime,
linen, locks, magnets, mangoes, maple syrup, markers, masks, mirrors, mugs, mustard, nails,
napkins, needles, notebooks, oats, olive oil, onions, oranges, paint, pans, paper, pears, pencils,
pepper, pillows, pipes, plates, plums, potatoes, printer toner, pumps, quilts, radishes, raisins,
ribbons, rice, ropes, rubber gloves, salt, sand, screws, sesame, sheets, shovels, silk, soap,
socks, spoons, stamps, stools, straw, sugar, tables, tape, tiles, tomatoes, towels, trays, valves,
vases, vinegar, walnuts, wax, wheels, white wine, wool, yarn, yeast, zips
"""

UNITS = "bag barrel bottle box bundle carton case crate pack pallet roll sack tin".split()
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
NUMBER_WORDS = "one two three four five six seven eight nine ten eleven twelve".split()

# A part in square brackets may be left out; what is left out is null in the answer.
TEMPLATES = """
Please send {amount} to {customer}[ in {city}][ by {due}].
Could you send {amount} to {customer}[ in {city}][ by {due}]?
{customer}[ from {city}] would like {amount}[ by {due}].
{customer}[ in {city}] needs {amount}[ by {due}].
{customer} wants {amount}[ delivered to {city}][ by {due}].
I need {amount}[ shipped to {city}][ by {due}]. The name is {customer}.
My name is {customer}[ and I live in {city}]. I want to order {amount}[ for {due}].
This is {customer}[ from {city}]. Can I get {amount}[ by {due}]?
New order: {amount} for {customer}[, {city}][, due {due}].
Order for {customer}[ ({city})]: {amount}[, needed {due}].
[For {due}: ]{amount} to {customer}[ in {city}].
[By {due}, ]{customer}[ of {city}] has to have {amount}.
We ran out again. {customer}[ in {city}] asks for {amount}[, at the latest {due}].
Put {amount} on the truck[ to {city}] for {customer}[, arriving {due}].
Ship {amount}[ to {city}], attention {customer}[, before {due}].
Add {amount} to the account of {customer}[ in {city}][, to arrive {due}].
Just spoke to {customer}[ in {city}]: {amount}[, please deliver {due}].
{customer} called[ from {city}] and ordered {amount}[ for {due}].
Customer {customer}[, city {city}], wants {amount}[, due {due}].
Send {customer} {amount}[ in {city}][ by {due}].
Can {customer} have {amount}[ in {city}][ by {due}]?
[Delivery {due}. ]{amount}, for {customer}[ in {city}].
""".strip().splitlines()
OPENINGS = ["Hello, ", "Hi! ", "Good morning. ", "Quick note: ", "Dear team, "]
CLOSINGS = [" Thanks!", " Thank you.", " Best regards", " It is urgent.", " Call me any time."]


@dataclass
class Order:
    """What the assistant answers, in the order of its keys."""

    item: str
    quantity: int
    unit: str | None
    customer: str
    city: str | None
    due: str | None


@dataclass
class Pools:
    """The open classes of words that one split may draw from."""

    first_names: list[str]
    last_names: list[str]
    cities: list[str]
    items: list[str]


def split_words(words: list[str], rng: random.Random) -> dict[str, list[str]]:
    """Shuffle words and deal each of them to exactly one split."""
    shuffled = rng.sample(words, len(words))
    splits: dict[str, list[str]] = {}
    for name, share in SHARE_OF_WORDS.items():
        count = round(share * len(words))
        splits[name], shuffled = shuffled[:count], shuffled[count:]
    return splits


def split_list(text: str) -> list[str]:
    """Return the entries between commas; an entry of two words may run over a line end."""
    return [" ".join(entry.split()) for entry in text.split(",")]


def build_pools(rng: random.Random) -> dict[str, Pools]:
    """Return the pools of every split; no word of an open class is in two of them."""
    first_names = split_words(FIRST_NAMES.split(), rng)
    last_names = split_words(LAST_NAMES.split(), rng)
    cities = split_words(split_list(CITIES), rng)
    items = split_words(split_list(ITEMS), rng)
    return {split: Pools(first_names[split], last_names[split], cities[split], items[split]) for split in NUM_ROWS}


def draw_quantity(rng: random.Random) -> tuple[int, str]:
    """Return a quantity and how the message writes it."""
    if rng.random() < 0.35:
        quantity = rng.randint(1, len(NUMBER_WORDS))
        return quantity, NUMBER_WORDS[quantity - 1]
    quantity = rng.choice([rng.randint(1, 20), rng.randint(1, 99), 10 * rng.randint(2, 60)])
    return quantity, str(quantity)


def draw_due(rng: random.Random) -> str:
    """Return a weekday, a date or a word for a day; it is copied as it stands."""
    day = rng.choice(WEEKDAYS)
    date = f"{rng.randint(1, 28)} {rng.choice(MONTHS)}"
    return rng.choice([day, day, date, f"next {day}", "tomorrow"])


def plural(unit: str) -> str:
    """Return the plural of a unit."""
    return unit + ("es" if unit.endswith("x") else "s")


def draw_message(pools: Pools, rng: random.Random) -> tuple[str, Order]:
    """Return one message and the order it contains."""
    item = rng.choice(pools.items)
    quantity, amount = draw_quantity(rng)
    unit = None
    if quantity == 1 or not item.endswith("s") or rng.random() < 0.7:
        unit = rng.choice(UNITS)
        amount += f" {unit if quantity == 1 else plural(unit)} of"
    customer = f"{rng.choice(pools.first_names)} {rng.choice(pools.last_names)}"
    city, due = rng.choice(pools.cities), draw_due(rng)

    # Dropping the optional parts first leaves a template that says which fields the message has.
    template = re.sub(r"\[(.*?)\]", lambda part: part[1] if rng.random() < 0.75 else "", rng.choice(TEMPLATES))
    text = template.format(amount=f"{amount} {item}", customer=customer, city=city, due=due)
    text = text[0].upper() + text[1:]
    if rng.random() < 0.25:
        text = rng.choice(OPENINGS) + text
    if rng.random() < 0.25:
        text += rng.choice(CLOSINGS)
    order = Order(
        item,
        quantity,
        unit,
        customer,
        city if "{city}" in template else None,
        due if "{due}" in template else None,
    )
    return text, order


def build_rows(pools: Pools, num_rows: int, rng: random.Random) -> list[dict[str, object]]:
    """Return num_rows chats with different messages."""
    orders: dict[str, Order] = {}
    while len(orders) < num_rows:
        text, order = draw_message(pools, rng)
        orders[text] = order
    return [
        {
            "messages": [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": text},
                {"role": "assistant", "content": json.dumps(asdict(order), ensure_ascii=False)},
            ]
        }
        for text, order in orders.items()
    ]


def main() -> None:
    """Write the three splits."""
    parser = argparse.ArgumentParser(description="Write the orders data set.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("finetune/assets/orders"))
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()

    rng = random.Random(arguments.seed)
    pools = build_pools(rng)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for split, num_rows in NUM_ROWS.items():
        rows = build_rows(pools[split], num_rows, rng)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (arguments.folder / f"{split}.jsonl").write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
