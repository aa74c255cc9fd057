"""Dates, amounts, measures and round numbers in English and in other languages, from Babel's copy of the Unicode CLDR.

A source names the target language: "fr: Monday, March 3, 1997" is "lundi 3 mars 1997".
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from random import Random

from mmattn.errors import ConfigError

CURRENCIES = ("USD", "EUR", "JPY", "GBP", "CHF", "CAD", "SEK", "PLN", "INR", "BRL", "MXN", "NOK")
UNITS = (
    "length-kilometer",
    "length-meter",
    "mass-kilogram",
    "duration-day",
    "duration-hour",
    "duration-week",
    "temperature-celsius",
    "volume-liter",
    "speed-kilometer-per-hour",
)


def write_pairs(count: int, languages: tuple[str, ...], seed: int) -> list[tuple[str, str]]:
    """Return `count` different sources with their translations."""
    from babel import Locale, UnknownLocaleError

    for language in languages:
        try:
            english = Locale.parse(language).language == "en"
        except (UnknownLocaleError, ValueError):
            english = True
        if english:
            raise ConfigError(f"data.languages: the CLDR has no {language!r} to translate into; such as fr, pt_BR, ja")
    random, pairs = Random(f"dates/{seed}"), {}
    # There are millions; a few are drawn twice.
    while len(pairs) < count:
        write, language = random.choice((_date, _amount, _measure, _round))(random), random.choice(languages)
        pairs[f"{language}: {_spaced(write('en'))}"] = _spaced(write(language))
    return list(pairs.items())


def _date(random: Random) -> Callable[[str], str]:
    from babel.dates import format_date

    day = date.fromordinal(random.randint(date(1900, 1, 1).toordinal(), date(2099, 12, 31).toordinal()))
    return lambda language: format_date(day, "full", locale=language)


def _amount(random: Random) -> Callable[[str], str]:
    from babel.numbers import format_currency

    amount, currency = _number(random), random.choice(CURRENCIES)
    return lambda language: format_currency(amount, currency, locale=language, format_type="name")


def _measure(random: Random) -> Callable[[str], str]:
    from babel.units import format_unit

    amount, unit = _number(random), random.choice(UNITS)
    return lambda language: format_unit(amount, unit, "long", locale=language)


def _round(random: Random) -> Callable[[str], str]:
    from babel.numbers import format_compact_decimal

    amount = random.randint(10, 9999) * 10 ** random.randint(2, 7)
    return lambda language: format_compact_decimal(amount, format_type="long", locale=language, fraction_digits=1)


def _number(random: Random) -> float:
    return random.choice((random.randint(1, 99), random.randint(100, 99_999), random.randint(10, 99_999) / 10))


def _spaced(text: str) -> str:
    """Replace narrow and unbreakable spaces of the CLDR by ordinary ones."""
    return " ".join(text.split())
