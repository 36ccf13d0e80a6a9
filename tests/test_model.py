"""model.py: what holds for all four placements, and what tells them apart."""
import copy
import math
import re

import pytest
import torch
import torch.nn.functional as F

from model import (GPT, NORMS, Attention, Block, GPTConfig, Residual, depth_profile, edge_norms,
                   rotary_table, rotate)


def make(norm="geo", seed=0, **changes):
    torch.manual_seed(seed)
    shape = dict(block_size=16, vocab_size=70, n_layer=3, n_head=2, n_embd=32)
    return GPT(GPTConfig(**shape | {"norm": norm} | changes)).eval()


def ids(B, T, seed=0, vocab_size=70):
    return torch.randint(vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=NORMS)
def norm(request):
    return request.param


SCHEDULES = {"none": lambda l, L: 1, "harmonic": lambda l, L: 1 / (l + 1),
             "sqrt": lambda l, L: (l + 1) ** -0.5, "linear": lambda l, L: (L - l) / L}


@pytest.mark.parametrize("decay, entry", [("own", "own"), ("none", "none"), ("sqrt", "norm"),
                                          ("harmonic", "own"), ("linear", "none")])
def test_placements_are_their_formulas(norm, decay, entry):
    """method.md's table restated with other names: one sublayer, both edges, decay and entry."""
    model = make(norm, decay=decay, entry=entry).double()
    with torch.no_grad():
        for name, p in model.named_parameters():    # gains of 1 would hide a norm's gain
            if "norm" in name or name.startswith(("entry", "exit")):
                p.copy_(torch.rand_like(p) + 0.5)

    def N(module, x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * getattr(module, "weight", 1)
    idx = ids(2, 9)
    x = F.embedding(idx, model.wte.weight)
    if entry == "norm" or (entry == "own" and norm != "pre"):
        x = N(model.entry if norm in ("post", "peri") and entry == "own" else None, x)
    word = {"own": "sqrt" if norm == "geo" else "none"}.get(decay, decay)
    for layer, block in enumerate(model.blocks):
        d = SCHEDULES[word](layer, 3)
        for place, args in ((block.attention, (model.rotary[:, :9],)), (block.mlp, ())):
            if norm == "pre":
                x = x + d * place.f(N(place.norm_in, x), *args)
            elif norm == "post":
                x = N(place.norm_out, x + d * place.f(x, *args))
            elif norm == "peri":
                x = x + d * N(place.norm_out, place.f(N(place.norm_in, x), *args))
            else:
                g, r = place.f(x, *args), x.norm(dim=-1, keepdim=True)
                v = g - (x * g).sum(-1, keepdim=True) / r**2 * x
                n = v.norm(dim=-1, keepdim=True)
                theta = (n / r).clamp(max=math.pi / 4) * d
                x = theta.cos() * x + theta.sin() * r * v / n
    x = x if norm == "post" else N(model.exit, x)
    # Logits are float32.
    assert (model(idx, idx)[0] - (x @ model.wte.weight[:70].T)).abs().max() < 1e-5


def test_only_its_own_norms_exist(norm):
    """A norm that is not used must not be in the checkpoint, so a wrong load fails on its keys."""
    names = {re.sub(r"blocks\.\d\.", "", n) for n, _ in make(norm).named_parameters()
             if "f.c_" not in n and n != "wte.weight"}

    def both(*ends):
        return {f"{place}.{end}" for place in ("attention", "mlp") for end in ends}
    assert names == {"pre": both("norm_in.weight") | {"exit.weight"},
                     "post": both("norm_out.weight") | {"entry.weight"},
                     "peri": both("norm_in.weight", "norm_out.weight")
                             | {"entry.weight", "exit.weight"},
                     "geo": both("step.scale", "step.bias") | {"exit.weight"}}[norm]
    other = make("pre" if norm != "pre" else "post")
    with pytest.raises(RuntimeError):
        other.load_state_dict(make(norm).state_dict())


def test_one_seed_starts_all_four_alike():
    """Otherwise a difference in the table may be the start's and not the norm's."""
    states = [make(norm, seed=3).state_dict() for norm in NORMS]
    shared = set.intersection(*(set(s) for s in states))
    assert len(shared) == 1 + 3 * 4
    assert all(torch.equal(states[0][name], s[name]) for s in states for name in shared)


def test_placements_draw_no_random_numbers(norm):
    """A placement that drew its own parameters at random would start with other weights."""
    config = GPTConfig(16, 70, 3, 2, 32, norm=norm)
    before = torch.get_rng_state()
    Residual(config, 1, torch.nn.Identity())
    edge_norms(config)
    assert torch.equal(torch.get_rng_state(), before)


def test_standard_deviations_at_the_start():
    """init_weights' docstring, measured."""
    for name, p in make(n_embd=256, n_layer=4, n_head=4, vocab_size=500).named_parameters():
        if name == "wte.weight":
            std = 0.02
        elif "c_proj" in name:
            std = (256 if "attention" in name else 1024) ** -0.5 / math.sqrt(8)
        elif "f.c_" in name:
            std = 256 ** -0.5
        else:
            start = torch.zeros_like(p) if name.endswith("bias") else torch.ones_like(p)
            assert torch.equal(p, start)
            continue
        assert p.std().item() == pytest.approx(std, rel=0.02), name
        assert abs(p.mean().item()) < 0.02 * std, name


def test_loss_at_the_start_is_that_of_a_guess(norm):
    idx = ids(4, 17)
    assert make(norm)(idx[:, :-1], idx[:, 1:])[1].item() == pytest.approx(math.log(70), abs=0.1)


def test_overfits_one_batch(norm):
    model, idx = make(norm).train(), ids(2, 17)
    optimizer = torch.optim.AdamW(model.param_groups(0.0), lr=3e-3)
    for _ in range(100):
        optimizer.zero_grad()
        loss = model(idx[:, :-1], idx[:, 1:])[1]
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3


def test_causal(norm):
    """A later token must not change an earlier answer."""
    model, a = make(norm), ids(1, 16)
    b = a.clone()
    b[0, 9] = (b[0, 9] + 1) % 70
    first, second = model(a, a)[0], model(b, b)[0]
    assert torch.equal(first[:, :9], second[:, :9])
    assert not torch.equal(first[:, 9:], second[:, 9:])


def test_stream_stays_on_the_sphere():
    """geo: the radius is sqrt(C) at the entry and the same after every sublayer."""
    model = make("geo", n_embd=128, n_layer=6)
    radii = []
    for module in model.modules():
        if isinstance(module, Residual) or module is model.entry:
            module.register_forward_hook(lambda m, i, out: radii.append(out.norm(dim=-1)))
    model(ids(2, 16))
    assert len(radii) == 13
    assert torch.allclose(radii[0], torch.tensor(128.0).sqrt(), rtol=2e-3)
    assert all(torch.allclose(r, radii[0], rtol=1e-5) for r in radii)


def test_logits_and_loss():
    """No targets: only the last position. -1 is not counted. Padded ids (70 to 128) are cut."""
    model, idx = make(), ids(2, 10)
    all_logits, loss = model(idx, idx)
    last, none = model(idx)
    assert all_logits.shape == (2, 10, 70) and last.shape == (2, 1, 70) and none is None
    assert torch.allclose(last[:, 0], all_logits[:, -1], atol=1e-6)
    targets = idx.clone()
    targets[:, :4] = -1
    counted = F.cross_entropy(all_logits[:, 4:].reshape(-1, 70), idx[:, 4:].reshape(-1))
    assert torch.allclose(model(idx, targets)[1], counted)
    assert loss.dtype == torch.float32 and model.wte.num_embeddings == 128


def test_rotary_is_a_rotation_and_relative():
    """Scores depend only on the distance, and lengths stay; one dropped term once broke both."""
    table = rotary_table(GPTConfig(block_size=64, n_head=2, n_embd=32)).double()
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def at(x, i):
        return rotate(x, table[:, i:i + 1])
    assert torch.allclose(at(q, 40).norm(), q.norm())
    assert torch.allclose((at(q, 5) * at(k, 2)).sum(), (at(q, 45) * at(k, 42)).sum(), atol=1e-5)
    assert torch.equal(at(q, 0), q)
    assert not torch.allclose(at(q, 1), q)


def test_rotary_angles_are_float32():
    """Built under a bfloat16 default, 513 of 1,024 positions were distinct."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        table = GPT(GPTConfig(1024, 70, 1, 1, 64)).rotary
    finally:
        torch.set_default_dtype(torch.float32)
    assert table.dtype == torch.float32
    assert len(torch.unique(torch.cat((table[0, :, 0], table[1, :, 0]), dim=1), dim=0)) == 1024


def test_cache_is_the_uncached_forward(norm):
    """A prompt of 5 then one at a time, and 3 cached then a chunk of 2: the same logits."""
    model, idx = make(norm), ids(2, 12)
    expected = model(idx, idx)[0]
    for chunks in ([5] + [1] * 7, [3, 2, 7]):
        cache = [layer.fill_(math.nan) for layer in model.new_cache(2)]
        start = 0
        for n in chunks:
            chunk = idx[:, start:start + n]
            logits, _ = model(chunk, chunk, cache=cache, start=start)
            assert (logits - expected[:, start:start + n]).abs().max() < 1e-5
            start += n


@pytest.mark.parametrize("changes, word", [
    ({"norm": "sandwich"}, "pre, post, peri, geo"), ({"n_embd": 130, "n_head": 4}, "130"),
    ({"n_embd": 36, "n_head": 4}, "rotary"), ({"block_size": 0}, "block_size"),
    ({"n_layer": 0}, "n_layer"), ({"vocab_size": -1}, "-1"), ({"dropout": 1.0}, "dropout"),
    ({"dropout": -0.1}, "dropout"), ({"decay": "cosine"}, "own, none, harmonic, sqrt, linear"),
    ({"entry": "gain"}, "own, none, norm"), ({"geo_p": -1.0}, "geo_p must"),
    ({"geo_max_angle": 0}, "geo_max_angle")])
def test_config_refuses_in_words(changes, word):
    with pytest.raises(ValueError, match=word):
        GPTConfig(**changes)


def test_context_longer_than_block_size_is_refused():
    with pytest.raises(ValueError, match="17 tokens"):
        make()(ids(1, 17))


def test_a_placement_nobody_wrote_is_an_error():
    """A fork that adds a name and forgets a branch must not train the identity."""
    residual = Residual(GPTConfig(n_embd=16, n_head=2, norm="pre"), 0, torch.nn.Identity())
    residual.norm = "mix"
    with pytest.raises(ValueError, match="mix"):
        residual(torch.ones(1, 1, 16))
    config = GPTConfig(n_embd=16, n_head=2)
    config.norm = "mix"
    with pytest.raises(ValueError, match="mix"):
        edge_norms(config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stream_is_float32_under_autocast(norm, dtype):
    """RMSNorm by itself answers bf16 on a CPU and float32 on CUDA: a comparison of dtypes."""
    model, seen = make(norm), set()
    for module in model.modules():
        if isinstance(module, (Block, Residual, torch.nn.RMSNorm)):
            module.register_forward_hook(lambda m, i, out: seen.add(out.dtype))
    idx = ids(2, 10)
    with torch.autocast("cpu", dtype):
        logits, loss = model(idx, idx)
    assert seen == {torch.float32} and logits.dtype == loss.dtype == torch.float32
    assert loss.item() == pytest.approx(model(idx, idx)[1].item(), rel=0.02)


def test_extreme_embedding_rows_are_finite(norm):
    """A zero row, a row of 300 in float16 (its square overflows), a bf16 row of std 0.058."""
    for dtype, value in ((torch.float32, 0.0), (torch.float16, 0.0), (torch.float16, 300.0),
                         (torch.bfloat16, None)):
        model = make(norm).to(dtype)
        with torch.no_grad():
            model.wte.weight[7] = torch.randn(32) * 0.058 if value is None else value
        idx = ids(2, 10).clamp(min=8)
        idx[0, 4] = 7
        _, loss = model(idx, ids(2, 10, seed=1))
        loss.backward()
        assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters())


def test_one_eps_for_every_dtype(norm):
    assert {m.eps for m in make(norm).modules() if isinstance(m, torch.nn.RMSNorm)} == {1e-6}


def test_deepcopy_is_a_model_of_its_own(norm):
    """Lambdas in modules keep running the original's weights."""
    model = make(norm)
    twin = copy.deepcopy(model)
    before = model(ids(1, 8))[0]
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(0.1)
    assert torch.equal(model(ids(1, 8))[0], before) and not torch.equal(twin(ids(1, 8))[0], before)


def test_head_is_the_embedding_after_loading(norm):
    model, twin = make(norm), make(norm, seed=1)
    count = sum(p.numel() for p in model.parameters())
    twin.load_state_dict(model.state_dict())
    assert sum(p.numel() for p in twin.parameters()) == count
    assert sum(v.numel() for v in model.state_dict().values()) == count
    assert torch.equal(twin(ids(1, 8))[0], model(ids(1, 8))[0])


def test_loss_is_that_of_forward(norm):
    """`loss` is what training compiles; it must be the number that `forward` gives."""
    model, idx = make(norm), ids(2, 10)
    assert torch.equal(model.loss(idx, idx), model(idx, idx)[1])


def test_depth_profile_of_frozen_scalars():
    """Freezing a parameter once ended the profile with a RuntimeError."""
    model = make("geo")
    for residual in model.modules():
        if isinstance(residual, Residual):
            residual.step.scale.requires_grad_(False)
    rows = depth_profile(model, ids(2, 8), ids(2, 8))
    assert len(rows) == 6 and all(row["grad_norm"] > 0 for row in rows)


def test_depth_profile_counts_the_clamped():
    """The share of tokens that propose a longer turn than max_angle; nothing for the others."""
    model, idx = make("geo", geo_max_angle=0.3), ids(2, 8)
    shares = []

    def count(step, inputs, after):
        x, g = inputs
        along = (x * g).sum(-1, keepdim=True) / x.square().sum(-1, keepdim=True)
        turned = (g - along * x).norm(dim=-1) / x.norm(dim=-1)
        shares.append((turned > 0.3).float().mean().item())
    for residual in model.modules():
        if isinstance(residual, Residual):
            residual.step.register_forward_hook(count)
    rows = depth_profile(model, idx, idx)
    assert [row["clamped"] for row in rows] == pytest.approx(shares) and 0 < sum(shares) < 6
    assert {row["clamped"] for row in depth_profile(make("post"), idx, idx)} == {""}


def test_gpt2_preset_is_124m_parameters():
    with torch.device("meta"):
        block = Block(GPTConfig(norm="pre"), 0)
    assert 12 * sum(p.numel() for p in block.parameters()) + 50304 * 768 + 768 == 123_587_328


def test_attention_drops_only_when_training():
    attention = Attention(GPTConfig(block_size=8, n_head=2, n_embd=16, dropout=0.5))
    x, table = torch.randn(1, 8, 16), rotary_table(GPTConfig(block_size=8, n_head=2, n_embd=16))
    assert not torch.equal(attention(x, table), attention(x, table))
    attention.eval()
    assert torch.equal(attention(x, table), attention(x, table))
