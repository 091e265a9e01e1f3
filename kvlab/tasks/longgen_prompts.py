"""The topics of longgen's short prompts: openings and plans of LongGenBench's four kinds, in our own words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Short:
    """One kind: the name of its entries (singular, plural), the prompt's opening, and plans for entries."""

    type: str
    units: str
    opening: str
    once: tuple[str, ...]
    range: tuple[str, ...]
    periodic: tuple[str, ...]


SHORT: dict[str, Short] = {
    "diary": Short(
        "Week",
        "weeks",
        "Write Mara's diary of {entries} weeks, one short entry for each week. This is planned:",
        (
            "the birthday of her mother",
            "a broken bicycle",
            "a letter from Norway",
            "the wedding of her cousin",
            "a lost umbrella",
            "a new neighbour",
            "a visit to the dentist",
            "a job interview",
            "a storm in the garden",
            "a concert with Peter",
            "a found kitten",
            "the school reunion",
        ),
        ("holidays at the lake", "painting the kitchen", "a bad cold", "guests from Italy", "learning to skate"),
        ("swimming with Anna", "baking bread", "a phone call with grandfather", "cleaning the attic", "playing chess"),
    ),
    "menu": Short(
        "Menu Week",
        "weeks",
        "Plan the menus of a small restaurant for {entries} weeks, one short entry for each week. This is planned:",
        (
            "lobster soup",
            "a wedding cake",
            "pumpkin risotto",
            "roast goose",
            "pancakes with cherries",
            "fish curry",
            "a garlic festival",
            "venison stew",
            "apple strudel",
            "oysters with lemon",
            "lentil salad",
            "stuffed peppers",
        ),
        ("asparagus dishes", "a mushroom season", "a grill festival", "a week of Mexican food", "strawberry desserts"),
        ("sushi evening", "pasta with pesto", "vegetable lasagne", "chocolate pudding", "onion tart"),
    ),
    "skyscraper": Short(
        "Floor",
        "floors",
        "Describe a tower of {entries} floors, one short entry for each floor. This is planned:",
        (
            "a pharmacy",
            "a small cinema",
            "a bookshop",
            "a dance school",
            "a travel agency",
            "a bakery",
            "a law firm",
            "a radio station",
            "a flower shop",
            "a chess club",
            "a dental clinic",
            "a museum of clocks",
        ),
        ("a public library", "a luxury hotel", "a sports centre", "a language school", "an art gallery"),
        ("a roof terrace", "a coffee bar", "a meeting room", "an indoor garden", "a water fountain"),
    ),
    "city": Short(
        "Block",
        "blocks",
        "Design a town of {entries} blocks in a row, one short entry for each block. This is planned:",
        (
            "a hospital",
            "a fire station",
            "a theatre",
            "a botanical garden",
            "a police station",
            "a railway museum",
            "a court house",
            "a swimming pool",
            "a university",
            "a cathedral",
            "a stadium",
            "a prison",
        ),
        ("an industrial park", "a shopping street", "a harbour quarter", "student housing", "a nature reserve"),
        ("a bus station", "a playground", "a post office", "a parking garage", "a vegetable market"),
    ),
}
