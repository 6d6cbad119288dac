"""Which chip a name means, and which chip a machine has: the data sheets are in the hardware profiles."""

import re

from rocm_ext.base.errors import UserError, nearest
from rocm_ext.machine.profile import Chip, Profile, load_profile, profile_names

_MAKERS_WORDS = re.compile("(amd|nvidia|instinct|radeon|geforce|tesla|rtx|rx|ai|pro)+")
_SAYS_NOTHING = ("", "graphics", "unknown")  # "AMD Radeon Graphics" is any Radeon
# What torch adds to the name of a chip as sold: "H100 80GB HBM3", "MI250X/MI250", "MI300X VF"
_ADDED = r"(\d+gb|hbm\d?e?|sxm\d?|oam|pcie|vf|hf|mi\d+x?|graphics|dualslot|(workstation|server)edition)*"


def find_chip(name: str, hardware: str | None = None) -> tuple[str, str]:
    """Find the chip that a user means.

    Args:
        name: name of a chip or an architecture, in any spelling: "MI355X", "rx7900xtx", "AMD Radeon PRO W7900".
        hardware: the profile in which the chip must be; None: any.

    Returns:
        The names of the profile and of the chip. Of several chips that have the name, the first.

    Raises:
        UserError: no profile has such a chip, or another one than ``hardware``.
    """
    short, found, known, near = _short(name), [], list[str](), []
    for profile in map(load_profile, profile_names()):
        for chip_name, chip in profile.chips.items():
            known += [chip_name, chip.arch]
            names = [_short(each) for each in (chip_name, *chip.also, chip.arch)]
            if short in names:
                found.append((profile.name, chip_name))
            if short and any(short in each or each in short for each in names):
                near.append(chip_name)
    if not found:
        guess = f"; did you mean {', '.join(near[:5])}?" if near else nearest(name, set(known))
        raise UserError(f"--machine {name} is unknown{guess}")
    fitting = [(profile, chip) for profile, chip in found if hardware in (None, profile)]
    if not fitting:
        raise UserError(f"--machine {name} is hardware={found[0][0]}, which contradicts hardware={hardware}")
    return fitting[0]


def chips_of(profile: Profile, arch: str | None, name: str | None, memory: int | None = None) -> list[str]:
    """The chips of a profile that a machine may have, the likeliest first.

    Args:
        profile: profile whose chips count.
        arch: the machine's architecture.
        name: what torch calls its GPU; it may say no more than "AMD Radeon Graphics".
        memory: bytes of its own memory, which tells chips of one name apart; None: unknown, or shared with the host.

    Returns:
        Names of chips: those whose name is in ``name``, else all of the architecture.
    """
    device = _joined(name or "")

    def known_letters(chip_name: str, chip: Chip) -> int:
        return max(len(each) if each in device else 0 for each in map(_short, (chip_name, *chip.also)))

    matched = {key: known_letters(key, chip) for key, chip in profile.chips.items() if chip.arch == arch}
    best = max(matched.values(), default=0)
    likely = [key for key, letters in matched.items() if letters == best]
    return sorted(likely, key=lambda key: abs(profile.chips[key].memory - memory / 2**30) if memory else 0)


def named_chips(profile: Profile, arch: str | None, name: str, memory: int | None = None) -> list[str]:
    """:func:`chips_of` without guesses: none where ``name`` is another product's, such as "RTX 4090 Laptop GPU".

    Args:
        profile, arch, memory: see :func:`chips_of`.
        name: what torch calls the GPU.
    """
    may, short = chips_of(profile, arch, name, memory), _short(name)

    def has_name(chip_name: str) -> bool:
        names = map(_short, (chip_name, *profile.chips[chip_name].also))
        return any(re.fullmatch(re.escape(each) + _ADDED, short) for each in names)

    return may if short in _SAYS_NOTHING else list(filter(has_name, may))


def _joined(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def _short(name: str) -> str:
    """The name without the maker's words before it: 7900xtx for "AMD Radeon RX 7900 XTX"."""
    joined = _joined(name)
    return joined[match.end() :] if (match := _MAKERS_WORDS.match(joined)) else joined
