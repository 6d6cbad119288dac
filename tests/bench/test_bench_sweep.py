"""The sweep of training settings in `rocm-ext bench`."""

import pytest

from rocm_ext.bench.sweep import FOUR_BITS, Measurement, Sweep
from rocm_ext.machine.detect import Machine
from rocm_ext.machine.profile import load_profile
from tests.bench.test_bench import GIB, row, sweep


def speed_of(values: dict, four_bits: float) -> float:
    """A machine where eager attention and fp16 are fast, compilation only together with them, and 4 rows suffice."""
    speed = {1: 60, 2: 90, 4: 100, 8: 101, 16: 102}[values["rows"]]
    speed *= {"fp16": 2.0, "fp32": 1.0, "bf16": 0.5}[values.get("dtype", "fp32")]
    speed *= {"eager": 1.5, "math": 0.7}.get(values.get("attention", "auto"), 1.0)
    speed *= {True: 0.6}.get(values.get("enable_activation_checkpointing", "auto"), 1.0)
    speed *= four_bits if values.get(FOUR_BITS) else 1.0
    together = values.get("attention") == "eager" and values.get("dtype") == "fp16"
    return speed * ({True: 1.2, "max-autotune": 1.3} if together else {}).get(values["compile"], 1.0)


def simulate(swept: Sweep, fails: tuple = (), four_bits: float = 0.5) -> list[Measurement]:
    """The measurements of a whole sweep on this machine; the values in ``fails`` crash."""
    done: list[Measurement] = []
    while items := swept.following(done):
        assert len(done) < swept.most
        for item in items:
            if item.skip:
                done.append(Measurement(item, "skipped", {}, item.skip))
            elif set(fails) & set(item.values.values()):
                done.append(Measurement(item, "crashed", {}, "signal 11"))
            else:
                speed = speed_of(item.values, four_bits)
                done.append(row("training", speed, environ=item.environ, **item.values))
                done[-1].result["dtype"] = item.values.get("dtype", "fp32")
    return done


def test_each_key_is_varied_around_the_fastest_so_far():
    mi300 = Machine("rocm", "Linux", "2.11.0", "rocm", 190 * GIB, True, arch="gfx942")
    swept = sweep(mi300)
    done = simulate(swept)
    assert len(done) < 25, "all combinations would be hundreds"
    sizes = [each.item.values["rows"] for each in simulate(sweep(mi300, quick=True, batch_size=2))]
    assert sizes[:3] == [1, 2, 4], "the configured size is measured, too"
    fastest = {"batch_size": 4, "dtype": "fp16", "attention": "eager", "compile": "max-autotune"}
    assert {winner.key: winner.value for winner in swept.winners(done)} == fastest


def test_a_sweep_goes_on_past_what_is_locked_or_crashes():
    mi50 = Machine("rocm", "Linux", "2.9.1", "rocm", 30 * GIB, False, arch="gfx906")
    swept = sweep(mi50, locked=load_profile("mi50").locked)
    done = simulate(swept, fails=("flash", "efficient", 16))
    assert {each.item.values["compile"] for each in done if each.status == "skipped"} == {True, "max-autotune"}
    fastest = {"batch_size": 4, "dtype": "fp16", "attention": "eager"}
    assert {winner.key: winner.value for winner in swept.winners(done)} == fastest
    assert simulate(swept, fails=(1, 2, 4, 8, 16))[-1].item.values == {"rows": 16, "compile": False}


@pytest.mark.parametrize(("four_bits", "won"), [(0.5, False), (1.2, True)])
def test_four_bits_are_measured_where_they_are_locked(four_bits, won):
    halo = Machine("rocm", "Linux", "2.11.0", "rocm", 120 * GIB, True, arch="gfx1151")
    swept = sweep(halo, locked=load_profile("strix_halo").locked)
    done = simulate(swept, four_bits=four_bits)
    (measured,) = [each for each in done if FOUR_BITS in each.item.values and each.item.values["compile"] is False]
    assert (measured.status, measured.item.values["rows"]) == ("ok", 4)
    winners = {winner.key: winner for winner in swept.winners(done)}
    assert (FOUR_BITS in winners) == won
    if won:
        assert winners[FOUR_BITS].value is True
        reason = winners[FOUR_BITS].reason
        assert reason.startswith("1.20 times as fast as False")
        assert reason.endswith("hardware_overrides=[quantize_base]")
