"""Functions of the user's own: how their files and modules are imported, and how a change is noticed."""

from __future__ import annotations

from finetune.config.own_functions import resolve_functions

CART = """
CART = []

def add(item): CART.append(item)
def show(): return CART
"""


def test_the_functions_of_a_file_share_its_globals_and_two_keys_share_none(tmp_path):
    file = tmp_path / "cart.py"
    file.write_text(CART)
    names = ["cart.add", "cart.show"]
    one, other = (resolve_functions(names, {}, [str(file)], asked_by="rollout.tools") for _ in range(2))
    one["cart.add"]("rice")
    assert (one["cart.show"](), other["cart.show"]()) == (["rice"], [])
