"""The file that path `auto` predicts from: step times or a break-even map, and errors that say what is wrong with it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.compare.breakeven.files import to_json as map_to_json
from coordinator.compare.breakeven.map import Axes, BreakEvenMap, Point
from coordinator.compare.breakeven.model import Coefficients, Fit, Layout, Model
from coordinator.config import load
from coordinator.config_layers import ConfigError
from coordinator.path_model import PathModelError, read, to_json
from coordinator.routing.auto import COLOCATED, SPLIT, PathLoad, StepTimes, Work, predict

TIMES = {
    SPLIT: StepTimes(first_token_s=0.01, prompt_token_s=1e-3, step_s=0.01, running_s=1e-3, handover_s=0.05),
    COLOCATED: StepTimes(first_token_s=0.01, prompt_token_s=1e-3, step_s=0.01, running_s=1e-3),
}


def written(tmp_path: Path, change: Any = None) -> Path:
    content = json.loads(to_json(TIMES))
    if change is not None:
        change(content)
    file = tmp_path / "times.json"
    file.write_text(json.dumps(content))
    return file


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read(written(tmp_path)) == TIMES


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c["paths"]["split"].pop("step_s"), "paths.split.step_s"),
        (lambda c: c["paths"]["split"].update(step_s=0), "paths.split.step_s: Input should be greater than 0"),
        (lambda c: c["paths"]["colocated"].update(running_s=-1), "paths.colocated.running_s"),
        (lambda c: c["paths"].pop("colocated"), "paths.colocated"),
        (lambda c: c["paths"]["split"].update(speed=1), "paths.split.speed"),
        (lambda c: c.update(kind="weather"), "kind: Input should be 'step times'"),
        (lambda c: c.update(schema_version=9), "schema_version"),
    ],
)
def test_what_is_wrong_with_it_is_said_with_its_name(tmp_path: Path, change: Any, says: str) -> None:
    file = written(tmp_path, change)
    with pytest.raises(PathModelError) as caught:
        read(file)
    assert str(file) in str(caught.value)
    assert says in str(caught.value)


def test_a_file_that_is_missing_or_no_json_is_an_error_when_the_configuration_is_read(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for file, says in ((tmp_path / "none.json", "No such file"), (broken, "not JSON")):
        with pytest.raises(ConfigError) as caught:
            load(sets=[f"gateway.auto.model_file={file}"], environment={})
        assert f"gateway.auto.model_file: {file}" in str(caught.value)
        assert says in str(caught.value)
    with pytest.raises(ConfigError, match=r"auto\.model_file is missing"):
        load(sets=["gateway.default_path=auto"], environment={})


def test_a_configuration_with_a_model_has_path_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    monkeypatch.chdir(tmp_path)
    gateway = load(sets=["gateway.default_path=auto", "gateway.auto.model_file=times.json"], environment={}).gateway
    assert gateway.auto.model_file == tmp_path / "times.json", "a gateway may run in another folder"
    assert gateway.paths == ("split", "colocated", "auto")
    assert load(environment={}).gateway.paths == ("split", "colocated")


COEFFICIENTS = Coefficients(
    step_s=0.01,
    prompt_token_s=9e-5,
    decode_token_s=2e-4,
    context_s=1e-5,
    fixed_s=0.005,
    queueing=1.0,
    transfer_s=0.02,
    link_s_per_byte=1e-9,
    hidden=0.5,
)


def a_map(fit: Fit | None) -> BreakEvenMap:
    return BreakEvenMap(
        slo={"ttft_s": 1.0, "tpot_s": 0.05},
        records=("r",),
        model_name="m",
        machine={},
        axes=Axes(input_tokens=(1.0,), output_tokens=(1.0,), loads=(1.0,), bandwidths=(None,)),
        measured=(),
        fit=fit,
        calibrated=(Point(input_tokens=900.0, output_tokens=200.0, load=1.0),),
        notes=("loads are too few",),
    )


def test_a_map_gives_the_times_of_single_requests_that_its_own_model_has(tmp_path: Path) -> None:
    layout = Layout(prefill=1, decode=1, colocated=2, accelerators=2)
    model = Model(coefficients=COEFFICIENTS, layout=layout, kv_bytes_per_token=100_000)
    file = tmp_path / "map.json"
    file.write_text(map_to_json(a_map(Fit(model=model, errors={}, residual=0.1, observations=9))))
    times = read(file)
    work, idle = Work(prompt_tokens=900, output_tokens=200), PathLoad(running=1)
    for path in (SPLIT, COLOCATED):
        ours, theirs = predict(times[path], idle, work), model.times(path, 900, 200, 1e-9)
        assert ours.ttft_s == pytest.approx(theirs.ttft_s)
        assert ours.tpot_s == pytest.approx(theirs.tpot_s)
    file.write_text(map_to_json(a_map(None)))
    with pytest.raises(PathModelError, match="no fit \\(loads are too few\\)"):
        read(file)


class TestKeys:
    """`[gateway.auto.keys.NAME]`: errors at the start name the field and the limit, and never show what may be a key."""

    DIGEST = hashlib.sha256(b"key").hexdigest()

    def problems(self, tmp_path: Path, keys: dict[str, Any], *, model: bool = True) -> str:
        lines = []
        for name, fields in keys.items():
            lines += [
                f"[gateway.auto.keys.{json.dumps(name)}]",
                *(f"{key} = {json.dumps(value)}" for key, value in fields.items()),
            ]
        file = tmp_path / "config.toml"
        file.write_text("\n".join(lines))
        with pytest.raises(ConfigError) as caught:
            load(file, [f"gateway.auto.model_file={written(tmp_path)}"] if model else [], {})
        return str(caught.value)

    def test_a_key_is_read_with_its_limits(self, tmp_path: Path) -> None:
        sets = [
            f"gateway.auto.model_file={written(tmp_path)}",
            f'gateway.auto.keys.batch={{key_sha256 = "{self.DIGEST.upper()}", ttft_ms = 3600000, tpot_ms = 0.5}}',
        ]
        auto = load(None, sets, {}).gateway.auto
        assert auto.key_names == {self.DIGEST: "batch"}
        assert (auto.keys["batch"].ttft_ms, auto.keys["batch"].tpot_ms) == (3_600_000, 0.5)

    @pytest.mark.parametrize("value", ["sk-live-not-a-hash", "0" * 63, "g" * 64, 12345, "0" * 64 + "\n"])
    def test_what_is_no_hash_is_refused_and_not_shown(self, tmp_path: Path, value: object) -> None:
        text = self.problems(tmp_path, {"batch": {"key_sha256": value, "ttft_ms": 1, "tpot_ms": 1}})
        assert "gateway.auto.keys.batch.key_sha256: must be the SHA-256 of the key, 64 hexadecimal digits" in text
        assert str(value).strip() not in text

    @pytest.mark.parametrize(("name", "value"), [("ttft_ms", 0), ("ttft_ms", 3_600_001), ("tpot_ms", -1), ("tpot_ms", "fast")])
    def test_limits_are_named(self, tmp_path: Path, name: str, value: object) -> None:
        fields = {"key_sha256": self.DIGEST, "ttft_ms": 1, "tpot_ms": 1, name: value}
        text = self.problems(tmp_path, {"batch": fields})
        assert f"gateway.auto.keys.batch.{name}: " in text
        assert any(word in text for word in ("greater than 0", "less than or equal to 3600000", "valid number"))

    def test_the_same_key_twice_is_refused_by_both_names(self, tmp_path: Path) -> None:
        one = {"key_sha256": self.DIGEST, "ttft_ms": 1, "tpot_ms": 1}
        text = self.problems(tmp_path, {"a": one, "b": {**one, "key_sha256": self.DIGEST.upper()}})
        assert "keys.b.key_sha256 is that of keys.a" in text

    def test_what_is_missing_unknown_or_without_a_model_is_refused(self, tmp_path: Path) -> None:
        one = {"key_sha256": self.DIGEST, "ttft_ms": 1, "tpot_ms": 1}
        assert "gateway.auto.keys.a.tpot_ms: Field required" in self.problems(
            tmp_path, {"a": {"key_sha256": self.DIGEST, "ttft_ms": 1}}
        )
        assert "did you mean 'ttft_ms'?" in self.problems(tmp_path, {"a": {**one, "tftt_ms": 1}})
        assert "gateway.auto.keys" in self.problems(tmp_path, {"a b": one})
        assert "which needs model_file" in self.problems(tmp_path, {"a": one}, model=False)
