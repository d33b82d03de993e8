"""Memory of a forward grows linearly with the sequence: one head of 32768 tokens, d = 128, stays under 1 GiB above its inputs."""

import subprocess
import sys

import pytest

MEASURE = """
import sys
import torch
from lowbit_attn.recipes import RECIPES
from lowbit_attn.reference import Visibility, backward, forward

def resident(field):
    # Not getrusage: its peak survives an exec, so it starts at the size of the process that runs the tests.
    status = open("/proc/self/status").read().split()
    return int(status[status.index(field + ":") + 1]) * 1024

def attend(tokens):
    q, k, v = (torch.randn(1, 1, tokens, 128) for _ in range(3))
    before = resident("VmRSS")
    seen = Visibility.create(1, tokens, tokens, is_causal=recipe.causal)
    result = forward(q, k, v, recipe, seen, save=recipe.trains)
    if with_backward:
        backward(q, None, result.saved, result.output, result.lse, recipe, seen)
    return resident("VmHWM") - before

torch.set_num_threads(1)
recipe, with_backward = RECIPES[sys.argv[1]], sys.argv[3] == "backward"
attend(256)  # loads what a first call loads
print(attend(int(sys.argv[2])))
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")


def peak_above_inputs(recipe, tokens, direction="forward"):
    command = [sys.executable, "-c", MEASURE, recipe, str(tokens), direction]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.parametrize(("recipe", "direction"), [("mxfp8", "forward"), ("mxfp8", "backward"), ("fused_mxfp4", "forward")])
def test_a_quarter_of_the_tokens_takes_a_quarter_of_the_memory(recipe, direction):
    # One float32 score matrix of this size would already fill it.
    assert peak_above_inputs(recipe, 8192, direction) < 2**30 // 4


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["mxfp8", "fused_mxfp4"])
def test_32768_tokens_stay_under_one_gibibyte(recipe):
    assert peak_above_inputs(recipe, 32768) < 2**30
