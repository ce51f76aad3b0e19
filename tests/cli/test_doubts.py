"""`limit` prints what it assumes, `simulate` what its cloud does not meet, `reproduce` findings without an error."""

import json

import pytest
from typer.testing import CliRunner

from attn_flow.cli import reproduction
from attn_flow.cli.entry import app

SYMMETRIC = ["--G", "4,0;0,1", "--V", "1,0;0,2"]


def run(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == code, done.output + repr(done.exception)
    return done.output


def test_limit_prints_its_requirements() -> None:
    words = " ".join(run("limit", *SYMMETRIC).split())
    assert "requires:" in words
    assert "asymmetric law (not checked)" in words
    numbers = json.loads(run("limit", *SYMMETRIC, "--json"))
    assert {need["name"] for need in numbers["requires"]} >= {"large n", "asymmetric law"}


def test_simulate_doubts_a_symmetric_law() -> None:
    words = run("simulate", *SYMMETRIC, "--beta", "100", "--tokens", "100", "--quadrature", "--t", "24", "--quiet")
    words = " ".join(words.split())
    assert "doubt (beta 100): asymmetric law (NOT met)" in words
    assert "only rounding breaks the symmetry" in words


def test_simulate_suggests_quadrature_where_chance_decides() -> None:
    words = run("simulate", *SYMMETRIC, "--beta", "3,100", "--tokens", "100", "--t", "2", "--quiet")
    words = " ".join(words.split())
    assert "noisy" in words
    assert "doubt (beta 100): little noise (NOT met)" in words
    assert "sampling, not temperature, sets the smallest W2; use a quadrature (simulate --quadrature)" in words
    assert "doubt (beta 3, 100): asymmetric law (NOT met)" in words
    met = words.partition("requires, met: ")[2].partition(" doubt")[0]
    assert "off the border, simple leading eigenvalue" in met
    assert "little noise" not in met  # met at beta = 3 only


@pytest.mark.parametrize(("options", "code"), [((), 0), (("--strict",), 1)])
def test_a_claim_that_does_not_hold_is_no_error(options: tuple, code: int, monkeypatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    def made(name: str, *args: object, **options: object) -> dict:
        refuted = {"claim": "pigs fly", "value": 0.0, "expected": 1.0, "tolerance": 0.1, "holds": False}
        return {"claims": [refuted], "run": {"seconds": 0.0}}

    monkeypatch.setattr(reproduction, "reproduce", made)
    assert "1 claims do not hold" in run("reproduce", "hardmax", "--out", str(tmp_path), *options, code=code)
