"""The planner's arithmetic: figures worked out by hand, shapes refused by name, values refused with their limit."""

from __future__ import annotations

import gzip
import json
import shlex
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator import cli
from coordinator.planning.capacity import LengthMix, OtherMixError, check_mix, measured_rate, plan_capacity
from coordinator.planning.kv import Accelerator, KvPlan, Weights, plan_kv
from coordinator.planning.shape import KvShape, kv_shape, parameter_count
from coordinator.planning.values import RefusedValueError, parse_count
from scripts.guide import ROOT, console_commands

BIG = KvShape(layers=80, kv_heads=8, head_dim=128, element_bytes=Fraction(2))
HALF_T = Weights(parameters=500 * 10**9, element_bytes=Fraction(2))
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
"""The shape of Llama 3 8B, whose parameters are published: 8,030,261,248."""
MLA: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["plan", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})


class TestKv:
    def test_a_token_a_request_and_thirty_two_of_them(self) -> None:
        plan = plan_kv(BIG, tokens=8192, requests=32)
        assert plan.bytes_per_token == 327_680
        assert plan.bytes_per_request == 2_684_354_560
        assert plan.bytes_for_requests == 85_899_345_920

    @pytest.mark.parametrize(("tp", "pp", "each"), [(8, 2, 62_500_000_000), (8, 1, 125_000_000_000)])
    def test_weights_of_half_a_trillion(self, tp: int, pp: int, each: int) -> None:
        plan = plan_kv(BIG, tokens=1, tp=tp, pp=pp, weights=HALF_T)
        assert plan.weight_bytes == 10**12
        assert plan.weight_bytes_per_accelerator == each

    def test_room_beside_the_weights(self) -> None:
        """140 layers on 180 GB each: 0.61 to 0.67 M tokens on TP8, 3.0 to 3.1 M on TP8 x PP2."""
        shape = KvShape(layers=140, kv_heads=8, head_dim=128, element_bytes=Fraction(2))
        held = Accelerator(memory_bytes=180 * 10**9, memory_share=0.95)
        small = plan_kv(shape, tokens=8192, tp=8, weights=HALF_T, accelerator=held)
        large = plan_kv(shape, tokens=8192, tp=8, pp=2, weights=HALF_T, accelerator=held)
        assert small.bytes_per_token == 573_440
        assert small.room is not None
        assert 610_000 <= small.room.tokens <= 670_000
        assert small.room.requests == small.room.tokens // 8192
        assert large.room is not None
        assert 3_000_000 <= large.room.tokens <= 3_100_000
        assert round(small.bytes_per_request / 1e9, 2) == 4.70

    def test_more_ranks_than_heads_hold_each_head_more_than_once(self) -> None:
        plan = plan_kv(BIG, tokens=10, tp=16)
        assert (plan.kv_copies, plan.kv_heads_per_rank) == (2, 1)
        assert plan.bytes_per_token_per_accelerator * 16 == 2 * plan.bytes_per_token
        assert "held 2 times" in plan.notes[0]

    def test_uneven_stages_are_counted_at_the_fullest(self) -> None:
        shape = KvShape(layers=61, kv_heads=8, head_dim=128, element_bytes=Fraction(2))
        plan = plan_kv(shape, tokens=1, pp=2)
        assert plan.layers_per_stage == 31
        assert "uneven" in plan.notes[0]

    def test_half_a_byte_an_element(self) -> None:
        assert (
            plan_kv(KvShape(layers=2, kv_heads=1, head_dim=64, element_bytes=Fraction(1, 2)), tokens=3).bytes_per_request == 384
        )

    def test_a_last_block_is_whole(self) -> None:
        plan = plan_kv(BIG, tokens=17)
        assert plan.bytes_per_request == 17 * 327_680
        assert plan.bytes_per_request_in_blocks == 32 * 327_680

    @pytest.mark.parametrize(
        ("changes", "option", "limit"),
        [
            ({"tokens": 0}, "--tokens", "at least 1"),
            ({"requests": 0}, "--requests", "at least 1"),
            ({"tp": 0}, "--tp", "at least 1"),
            ({"tp": 3}, "--tp", "divide the 8 KV heads"),
            ({"tp": 12}, "--tp", "multiple"),
            ({"pp": 81}, "--pp", "at most the 80 layers"),
            ({"block_tokens": 0}, "--block-tokens", "at least 1"),
        ],
    )
    def test_what_cannot_be_is_refused_by_name(self, changes: dict[str, int], option: str, limit: str) -> None:
        with pytest.raises(RefusedValueError, match=limit) as refused:
            plan_kv(BIG, **{"tokens": 1, **changes})  # type: ignore[arg-type]
        assert refused.value.option == option

    def test_weights_that_fill_the_memory_are_refused(self) -> None:
        held = Accelerator(memory_bytes=80 * 10**9, memory_share=0.9)
        with pytest.raises(RefusedValueError, match="less than one KV block") as refused:
            plan_kv(BIG, tokens=1, tp=8, weights=HALF_T, accelerator=held)
        assert refused.value.option == "--memory"


class TestShape:
    def test_grouped_heads_from_a_configuration(self) -> None:
        assert kv_shape(LLAMA) == KvShape(layers=32, kv_heads=8, head_dim=128, element_bytes=Fraction(2))
        assert kv_shape(LLAMA, "fp8").bytes_per_token * 2 == kv_shape(LLAMA).bytes_per_token

    def test_without_groups_every_head_has_its_own(self) -> None:
        assert kv_shape({**LLAMA, "num_key_value_heads": None}).kv_heads == 32

    def test_a_latent_cache_is_one_vector_that_no_rank_divides(self) -> None:
        """61 layers of 512 + 64 in two bytes: 70,272 B a token, on each of eight ranks."""
        plan = plan_kv(kv_shape(MLA), tokens=1, tp=8)
        assert plan.bytes_per_token == plan.bytes_per_token_per_accelerator == 70_272
        assert "MLA" in plan.notes[0]

    def test_published_parameter_counts(self) -> None:
        assert parameter_count(LLAMA) == 8_030_261_248
        moe = {
            **LLAMA, "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
        }  # fmt: skip
        assert parameter_count(moe) == 46_702_792_704

    def test_the_small_models_are_counted_in_its_file(self, checkpoint: Path) -> None:
        with (checkpoint / "model.safetensors").open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        stored = 0
        for name, tensor in header.items():
            if name != "__metadata__" and name != "lm_head.weight":  # tied to the embeddings
                begin, end = tensor["data_offsets"]
                stored += (end - begin) // 2
        assert parameter_count(json.loads((checkpoint / "config.json").read_text())) == stored

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"sliding_window": 4096}, "sliding_window"),
            ({"mamba_d_state": 16}, "recurrent"),
            ({"is_encoder_decoder": True}, "encoder-decoder"),
            ({"attention_chunk_size": 8192}, "chunked"),
            ({"num_hidden_layers": None}, "num_hidden_layers"),
            ({"num_key_value_heads": 0}, "num_key_value_heads"),
            ({"num_attention_heads": 33}, "no multiple"),
            ({"dtype": "int7"}, "int7"),
        ],
    )
    def test_shapes_that_this_arithmetic_does_not_describe(self, changes: dict[str, Any], why: str) -> None:
        with pytest.raises(RefusedValueError, match=why):
            kv_shape({**LLAMA, **changes})

    def test_a_window_that_is_off_is_none(self) -> None:
        assert kv_shape({**LLAMA, "sliding_window": 4096, "use_sliding_window": False}) == kv_shape(LLAMA)

    def test_unknown_types_are_not_counted(self) -> None:
        with pytest.raises(RefusedValueError, match=r"deepseek_v3.*--parameters"):
            parameter_count(MLA)


class TestCapacity:
    def test_four_groups_and_a_spare(self) -> None:
        plan = plan_capacity(rate_per_s=20, replica_rate_per_s=8, headroom=0.7, spares=1, accelerators_per_replica=16)
        assert (plan.replicas, plan.total_replicas) == (4, 5)
        assert (plan.accelerators, plan.servers, plan.idle_accelerators) == (80, 10, 0)
        assert plan.load_share == pytest.approx(0.5)
        assert plan.load_share_one_lost == pytest.approx(0.625)

    def test_an_exact_fit_buys_no_replica(self) -> None:
        for count in range(1, 50):
            assert plan_capacity(rate_per_s=count * 8 * 0.7, replica_rate_per_s=8, headroom=0.7).replicas == count

    @pytest.mark.parametrize(("each", "replicas", "servers"), [(4, 3, 2), (3, 3, 2), (8, 3, 3), (12, 3, 6), (16, 1, 2)])
    def test_replicas_do_not_straddle_servers(self, each: int, replicas: int, servers: int) -> None:
        plan = plan_capacity(rate_per_s=replicas, replica_rate_per_s=1, headroom=1, accelerators_per_replica=each)
        assert plan.servers == servers
        assert plan.idle_accelerators == servers * 8 - replicas * each

    @pytest.mark.parametrize(
        ("changes", "option"),
        [
            ({"rate_per_s": 0}, "--rate"),
            ({"rate_per_s": float("nan")}, "--rate"),
            ({"replica_rate_per_s": -1}, "--replica-rate"),
            ({"replica_rate_per_s": 1e-300}, "--rate"),
            ({"headroom": 0}, "--headroom"),
            ({"headroom": 1.1}, "--headroom"),
            ({"spares": -1}, "--spares"),
            ({"accelerators_per_replica": 0}, "--accelerators-per-replica"),
            ({"accelerators_per_server": 0}, "--accelerators-per-server"),
        ],
    )
    def test_bad_values_name_their_option(self, changes: dict[str, Any], option: str) -> None:
        with pytest.raises(RefusedValueError, match=r"must be|more than") as refused:
            plan_capacity(**{"rate_per_s": 1.0, "replica_rate_per_s": 1.0, **changes})
        assert refused.value.option == option


def record(*rates: float | None) -> dict[str, Any]:
    return {
        "slo": {"ttft_s": 0.5, "tpot_s": 0.05, "itl_p99_s": None},
        "workloads": [{"prompt_tokens": [1000, 3000], "output_tokens": [128, 128]}],
        "knees": [
            {"seed": seed, "split": {"rate_per_s": rate, "why": "" if rate else "not measured"}, "colocated": {"rate_per_s": 1.0}}
            for seed, rate in enumerate(rates)
        ],
    }


class TestRecord:
    def test_the_rate_is_the_geometric_mean_of_the_seeds(self) -> None:
        found = measured_rate(record(4.0, 9.0, None), "split")
        assert found.rate_per_s == pytest.approx(6.0)
        assert (found.lowest_per_s, found.highest_per_s, found.seeds) == (4.0, 9.0, 2)
        assert found.mix == LengthMix(input_tokens=2000, output_tokens=128)
        assert found.slo == "TTFT 500 ms, TPOT 50 ms"

    def test_counted_lengths_go_before_the_ranges(self) -> None:
        counted = {**record(4.0), "lengths": {"input": {"mean": 10.0}, "output": {"mean": 20.0}}}
        assert measured_rate(counted, "split").mix == LengthMix(input_tokens=10, output_tokens=20)

    def test_arms_are_called_what_the_record_calls_them_and_it_may_be_compressed(self, tmp_path: Path) -> None:
        named = record(4.0)
        named["arms"] = [{"name": "two-colocated"}, {"name": "split"}]
        for entry in named["knees"]:
            entry["two-colocated"] = {"rate_per_s": 5.0, "why": ""}
        assert measured_rate(named, "two-colocated").rate_per_s == pytest.approx(5.0)
        with pytest.raises(RefusedValueError, match="one of two-colocated, split, got 'colocated'"):
            measured_rate(named, "colocated")
        path = tmp_path / "record.json.gz"
        path.write_bytes(gzip.compress(json.dumps(named).encode()))
        options = ["--rate=10", f"--record={path}", "--arm=two-colocated", "--input-tokens=2000", "--output-tokens=128"]
        done = run("capacity", *options, "--json")
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["replica_rate_per_s"] == pytest.approx(5.0)
        path.write_bytes(gzip.compress(b"{}")[:-9])
        assert "Compressed file ended" in run("capacity", *options).output

    @pytest.mark.parametrize(("arm", "found"), [("both", record(1.0)), ("split", record(None)), ("split", {"knees": 3})])
    def test_what_is_no_measurement(self, arm: str, found: dict[str, Any]) -> None:
        with pytest.raises(RefusedValueError, match=r"must be one of|no goodput|no comparison record"):
            measured_rate(found, arm)

    @pytest.mark.parametrize(
        ("input_tokens", "output_tokens", "other"), [(2100, 130, False), (2300, 128, True), (2000, 100, True)]
    )
    def test_another_mix_is_refused_or_said(self, input_tokens: float, output_tokens: float, other: bool) -> None:
        measured = measured_rate(record(4.0), "split")
        expected = LengthMix(input_tokens=input_tokens, output_tokens=output_tokens)
        if not other:
            assert check_mix(measured, expected, accept_other=False) == ()
            return
        with pytest.raises(OtherMixError, match="another length mix"):
            check_mix(measured, expected, accept_other=False)
        (note,) = check_mix(measured, expected, accept_other=True)
        assert "does not apply" in note


class TestCommands:
    BIG = ("kv", "--layers", "80", "--kv-heads", "8", "--head-dim", "128", "--dtype-bytes", "2")

    def test_json_holds_what_the_table_shows(self) -> None:
        said = json.loads(run(*self.BIG, "--tokens", "8192", "--requests", "32", "--json").output)
        assert (said["bytes_per_token"], said["bytes_per_request"]) == (327_680, 2_684_354_560)
        text = run(*self.BIG, "--tokens", "8192", "--requests", "32").output
        for figure in ("327,680 B", "2.68 GB", "85.9 GB"):
            assert figure in text

    def test_from_a_folder_or_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        found = [run("kv", "--model", str(path), "--tokens", "1", "--json") for path in (tmp_path, tmp_path / "config.json")]
        assert found[0].output == found[1].output
        assert json.loads(found[0].output)["weight_bytes"] == 2 * 8_030_261_248

    def test_a_cache_without_countable_weights_is_planned_alone(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(MLA))
        said = json.loads(run("kv", "--model", str(tmp_path), "--tokens", "1", "--json").output)
        assert (said["bytes_per_token"], said["weight_bytes"]) == (70_272, None)

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("kv", "--tokens", "1", "--layers", "3"), ("--kv-heads", "needed")),
            ((*BIG, "--tokens", "0"), ("--tokens", "at least 1")),
            ((*BIG, "--tokens", "1", "--kv-format", "fp8"), ("--kv-format", "not both")),
            ((*BIG[:-1], "nan", "--tokens", "1"), ("--dtype-bytes", "above 0")),
            ((*BIG, "--tokens", "1", "--memory", "lots"), ("--memory", "byte size")),
            ((*BIG, "--tokens", "1", "--memory", "80GB", "--memory-share", "2"), ("--memory-share", "at most 1")),
            ((*BIG, "--tokens", "1", "--parameters", "many"), ("--parameters", "500B")),
            ((*BIG, "--tokens", "1", "--parameters", "1B", "--weight-format", "fp7"), ("--weight-format", "bf16")),
            (("kv", "--tokens", "1", "--model", "no-such-folder"), ("--model", "No such file")),
            (("capacity", "--rate", "1"), ("--replica-rate", "--record")),
            (("capacity", "--rate", "0", "--replica-rate", "1"), ("--rate", "above 0")),
            (("capacity", "--rate", "1", "--record", "no-such-file", "--input-tokens", "1"), ("--output-tokens", "needed")),
        ],
    )
    def test_a_bad_value_is_wrong_usage_and_names_its_option(self, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
        done = run(*arguments)
        assert done.exit_code == 2
        for word in words:
            assert word in done.output

    @pytest.mark.parametrize("value", ["-1", "nan", "9" * 400])
    @pytest.mark.parametrize(
        "option",
        [
            "--tokens", "--layers", "--kv-heads", "--head-dim", "--dtype-bytes", "--requests", "--tp", "--pp", "--block-tokens",
            "--parameters", "--memory", "--memory-share", "--reserve", "--kv-format", "--weight-format",
        ],
    )  # fmt: skip
    def test_no_value_breaks_a_plan(self, option: str, value: str) -> None:
        """It is planned with, or refused by the option's name; nothing else."""
        done = run("kv", "--tokens", "8", "--layers", "2", "--kv-heads", "2", "--head-dim", "4", "--memory", "1GB", option, value)
        assert done.exit_code in (0, 2)
        assert done.exit_code == 0 or option in done.output

    def test_a_record_is_not_applied_to_another_mix_in_silence(self, tmp_path: Path) -> None:
        path = tmp_path / "record.json"
        path.write_text(json.dumps(record(4.0, 4.0, 4.0)))
        wanted = ("capacity", "--rate", "20", "--record", str(path), "--output-tokens", "128", "--json")
        assert json.loads(run(*wanted, "--input-tokens", "2000").output)["replicas"] == 8
        other = run(*wanted, "--input-tokens", "8000")
        assert other.exit_code == 1
        assert "another length mix" in other.output
        accepted = run(*wanted, "--input-tokens", "8000", "--accept-other-mix")
        assert "does not apply" in json.loads(accepted.output)["notes"][0]

    def test_the_guides_commands_run(self) -> None:
        guide = (ROOT / "docs" / "guide-researchers.md").read_text()
        # What reads a record that another command of the guide makes is run where that one is.
        plans = [c for c in console_commands(guide, "splitpoint") if c.split()[1] == "plan" and "--record runs/" not in c]
        assert len(plans) >= 4
        outputs = []
        for command in plans:
            done = run(*shlex.split(command)[2:])
            assert done.exit_code == 0, command
            outputs.append(done.output)
        for figure in ("327,680 B", "2.68 GB", "85.9 GB", "62.5 GB", "5 x 16 = 80", "10 of 8"):
            assert any(figure in output for output in outputs), figure


@pytest.mark.parametrize(
    ("text", "count"), [("500B", 500 * 10**9), ("1.5T", 15 * 10**11), ("135m", 135 * 10**6), ("8e9", 8 * 10**9)]
)
def test_counts(text: str, count: int) -> None:
    assert parse_count("--parameters", text) == count


@pytest.mark.parametrize("text", ["", "0", "B", "1.5", "-1B", "1e400x", "1e400"])
def test_counts_that_are_none(text: str) -> None:
    with pytest.raises(RefusedValueError):
        parse_count("--parameters", text)


def test_a_plan_is_json() -> None:
    plan: KvPlan = plan_kv(BIG, tokens=1, weights=HALF_T, tp=8)
    assert json.loads(json.dumps(plan.as_dict()))["accelerators_per_worker"] == 8
