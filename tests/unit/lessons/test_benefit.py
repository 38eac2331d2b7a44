"""The benefit: counted bytes against formulas by hand, and the roofline of a linear layer by its definition."""

import pytest

from mpkit.lessons import benefit

S, H, LAYERS, VOCABULARY = 1024, 768, 12, 50304  # GPT-2 124M, as `TinyGPT.gpt2_124m`
PARAMETERS = VOCABULARY * H + S * H + LAYERS * (12 * H * H + 13 * H) + 2 * H


@pytest.mark.parametrize("way", ["float32", "O2"])
def test_a_parameter_takes_16_bytes_with_adam_in_float32(way):
    """ZeRO (Rajbhandari et al. 2020), section 3.1: weights, gradients and two moments, 4 bytes each."""
    *held, _, _ = benefit.step_bytes("gpt2", way, 1).values()
    assert sum(held) == 16 * PARAMETERS


@pytest.mark.parametrize(("way", "copies"), [("float32", 0), ("O2", 2), ("8 bits", 1)])
def test_copies_of_weights_take_the_bytes_of_their_format(way, copies):
    """Of the linear layers, whose backward pass needs them; norms and embeddings have next to none."""
    linear = LAYERS * 12 * H * H + VOCABULARY * H
    assert benefit.step_bytes("gpt2", way, 1)["copies of weights"] == pytest.approx(copies * linear, rel=0.01)


@pytest.mark.parametrize("batch", [1, 8])
def test_what_gpt2_keeps_for_the_backward_pass(batch):
    """32 s b h bytes a layer in 16 bits: Korthikanti et al. 2022 count 34, two of them of dropout, which is not here.

    The inputs of both norms, their results, q, k, v, the attention's result and four widths before and after GELU are
    16 tensors of s b h; besides, a logarithm for each head and row, and two numbers of each norm. The end keeps
    log-softmax in float32.
    """
    one = S * batch * H
    least = LAYERS * 16 * one * 2 + S * batch * VOCABULARY * 4
    found = benefit.step_bytes("gpt2", "O2", batch)["kept for the backward pass"]
    assert 1 < found / least < 1.01
    wide = LAYERS * 16 * one * 4 + S * batch * VOCABULARY * 4 + 2 * one * 4
    assert 1 < benefit.step_bytes("gpt2", "float32", batch)["kept for the backward pass"] / wide < 1.01


def test_o1_of_a_convolutional_network_keeps_more_than_float32():
    whole = {way: sum(benefit.step_bytes("resnet50", way, 64, optimizer="momentum").values()) for way in benefit.WAYS}
    assert whole["O1"] > whole["float32"] > 1.7 * whole["O2"]


def test_the_largest_batch_fits_and_one_more_does_not():
    for network in benefit.NETWORKS:
        for again in (False, True):
            most = benefit.largest_batch(network, "O2", 16e9, again)
            kept = [sum(benefit.step_bytes(network, "O2", n, again).values()) for n in (most, most + 1)]
            assert kept[0] <= 16e9 < kept[1]
    assert benefit.largest_batch("gpt2", "O2", 1e9) == 0


def test_checkpointing_keeps_less_than_any_level():
    kept = {(way, again): benefit.step_bytes("gpt2", way, 8, again) for way in ("float32", "O2") for again in (0, 1)}
    whole = {key: sum(parts.values()) for key, parts in kept.items()}
    assert whole["O2", 1] < whole["float32", 1] < whole["O2", 0] < whole["float32", 0]


def test_a_layer_takes_the_slower_of_computing_and_moving():
    assert benefit.seconds("A100 40GB", "float16", 8192, 8192, 8192) == pytest.approx(2 * 8192**3 / 312e12)
    few = benefit.seconds("H100 SXM", "float16", 8, 4096, 4096)
    assert few == pytest.approx(2 * (8 * 4096 + 4096 * 4096 + 8 * 4096) / 3.35e12)
    assert benefit.seconds("T4", "fp8", 8, 8, 8) is None


def test_few_rows_gain_two_at_most_on_every_card():
    for card in benefit.CARDS:
        wide, narrow = (benefit.seconds(card, form, 8, 4096, 4096) for form in ("float32", "float16"))
        assert wide / narrow == pytest.approx(2)


def test_the_views_say_what_they_count():
    seen = benefit.memory(network="resnet50", batch=64, optimizer="momentum")
    assert seen.numbers["bytes"]["O1"] == benefit.step_bytes("resnet50", "O1", 64, optimizer="momentum")
    assert "not measured on a GPU" in benefit.roofline().sentence
