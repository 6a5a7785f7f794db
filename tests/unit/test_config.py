"""One TOML, one precedence, and refusals that name the key, the nearest known one, and where it was given."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.config import Settings, gateway_port, load
from coordinator.config_layers import ConfigError, parse_bytes
from coordinator.routing.views import Role

REPOSITORY = Path(__file__).resolve().parents[2]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "splitpoint.toml"
    path.write_text(text)
    return path


def refused(**arguments: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**{"environment": {}, **arguments})  # type: ignore[arg-type]
    return str(caught.value)


def test_defaults_give_one_prefill_and_one_decode_worker() -> None:
    settings = load(environment={})
    assert {name: (pool.role, pool.replicas) for name, pool in settings.pools.items()} == {
        "prefill": (Role.PREFILL, 1),
        "decode": (Role.DECODE, 1),
    }


def test_set_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = write(tmp_path, "[engine]\nmax_num_seqs = 2\nseed = 2\ndtype = 'float32'\n")
    environment = {"SPLITPOINT__ENGINE__MAX_NUM_SEQS": "3", "SPLITPOINT__ENGINE__SEED": "3"}
    engine = load(file, ["engine.max_num_seqs=4"], environment).engine
    assert (engine.max_num_seqs, engine.seed, engine.dtype, engine.max_model_len) == (4, 3, "float32", 4608)


def test_a_later_set_beats_an_earlier_one() -> None:
    assert load(sets=["engine.seed=1", "engine.seed=2"], environment={}).engine.seed == 2


def test_pools_of_a_file_replace_the_default_pools(tmp_path: Path) -> None:
    file = write(tmp_path, "[pools.all]\nrole = 'colocated'\nreplicas = 2\n")
    assert set(load(file, environment={}).pools) == {"all"}


def test_one_field_of_a_default_pool_can_be_set_from_outside() -> None:
    pools = load(environment={"SPLITPOINT__POOLS__PREFILL__REPLICAS": "3"}).pools
    assert pools["prefill"].replicas == 3
    assert pools["decode"].replicas == 1


def test_a_transport_that_is_switched_off_is_not_asked_for() -> None:
    assert load(environment={}).kvtransfer.transport_order == ("ucx", "grpc")
    assert load(sets=["kvtransfer.default_transport=grpc"], environment={}).kvtransfer.transport_order == ("grpc", "ucx")
    assert load(sets=['kvtransfer.transports=["grpc"]'], environment={}).kvtransfer.transport_order == ("grpc",)
    assert "kvtransfer.transports" in refused(sets=["kvtransfer.transports=[]"])


TLS = [f"security.{name}=/etc/splitpoint/{name}.pem" for name in ("cert_file", "key_file", "ca_file")]


def test_one_security_table_is_for_everything_that_opens_or_dials_a_port() -> None:
    settings = load(sets=[*TLS, 'kvtransfer.transports=["grpc"]'], environment={})
    assert settings.security is not None
    assert settings.security == settings.kvtransfer.tls == settings.worker.tls == settings.gateway.worker_client.tls
    parts = {"gateway": settings.gateway, "kvtransfer": settings.kvtransfer.model_copy(update={"tls": None})}
    assert Settings(security=settings.security, **parts).kvtransfer.tls == settings.security
    assert "kvtransfer.tls: set [security]" in refused(
        sets=[s.replace("security", "kvtransfer.tls") for s in TLS[:3]] + ['kvtransfer.transports=["grpc"]']
    )


def test_kv_beside_tls_is_refused_unless_it_is_allowed_by_name() -> None:
    assert "ucx would move KV unencrypted" in refused(sets=TLS)
    settings = load(sets=[*TLS, "security.allow_unencrypted_kv=true"], environment={})
    assert settings.kvtransfer.tls is not None
    assert "security.key_file: Field required" in refused(sets=[TLS[0], TLS[2]])


def test_a_server_for_other_hosts_tells_them_an_address_that_leads_there() -> None:
    for table in ("worker", "kvtransfer"):
        assert "leads other hosts to themselves" in refused(sets=[f"{table}.bind_host=0.0.0.0"])
        load(sets=[f"{table}.bind_host=0.0.0.0", f"{table}.advertise_host=10.0.0.1"], environment={})


def test_several_gateways_have_ports_of_their_own() -> None:
    settings = load(sets=["coordinator.gateways=3"], environment={})
    ports = [gateway_port(port, n) for port in (8000, 50051, 50052) for n in range(3)]
    assert len(set(ports)) == 9
    assert (gateway_port(8000, 0), gateway_port(0, 2)) == (8000, 0)
    assert settings.coordinator.gateways == 3
    text = refused(sets=["coordinator.gateways=2", "gateway.http_port=7000", "gateway.admin_port=7010"])
    assert "7010" in text
    assert "gateway.admin_port" in text
    assert "gateway.http_port" in text
    load(sets=["gateway.http_port=7000", "gateway.admin_port=7010"], environment={})


def test_other_environment_variables_are_left_alone() -> None:
    assert load(environment={"SPLITPOINT_ADMIN": "x:1", "PATH": "/bin"}) == load(environment={})


def test_a_pool_overrides_single_engine_fields() -> None:
    settings = load(sets=["engine.max_num_seqs=7", "pools.prefill.engine.max_num_batched_tokens=512"], environment={})
    prefill, decode = settings.engine_of("prefill"), settings.engine_of("decode")
    assert (prefill.max_num_batched_tokens, prefill.max_num_seqs) == (512, 7)
    assert (decode.max_num_batched_tokens, decode.max_num_seqs) == (256, 7)


def test_pools_may_differ_in_tensor_parallelism() -> None:
    settings = load(
        sets=["pools.prefill.engine.tensor_parallel_size=2", "pools.decode.engine.tensor_parallel_size=4"], environment={}
    )
    assert [settings.engine_of(pool).world_size for pool in ("prefill", "decode")] == [2, 4]


@pytest.mark.parametrize("text", ["true", "3", '"3"', "[1]", "plain words", "1.5.2"])
def test_text_is_read_as_toml_or_taken_as_it_is(text: str) -> None:
    expected = {"true": True, "3": 3, '"3"': "3", "[1]": [1]}.get(text, text)
    engine = load(sets=[f"engine.extra_arguments.x={text}"], environment={}).engine
    assert engine.extra_arguments == {"x": expected}


@pytest.mark.parametrize(
    ("text", "size"),
    [("256MiB", 256 << 20), ("1GB", 10**9), ("1.5KiB", 1536), ("4096", 4096), ("7 B", 7), ("2TiB", 2 << 40), ("0.5G", 5 * 10**8)],
)
def test_byte_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1MiB", "1.0001B", "1iB", "three", "1 MiB MiB", "1mib"])
def test_bad_byte_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="byte"):
        parse_bytes(text)


def test_byte_sizes_in_every_layer(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "[kvtransfer]\nsend_staging_bytes = '1MiB'\n[pools.p]\nrole='prefill'\n[pools.p.engine]\nkv_cache_bytes='2MiB'\n",
    )
    settings = load(file, ["kvtransfer.receive_staging_bytes=3MiB"], {})
    assert settings.kvtransfer.send_staging_bytes == 1 << 20
    assert settings.kvtransfer.receive_staging_bytes == 3 << 20
    assert settings.engine_of("p").kv_cache_bytes == 2 << 20


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["engine.max_num_seq=3"], ["engine.max_num_seq", "did you mean 'max_num_seqs'", "--set engine.max_num_seq=3"]),
        (["enginee.seed=1"], ["enginee", "did you mean 'engine'"]),
        (["pools.decode.rol=x"], ["pools.decode.rol", "did you mean 'role'"]),
        (["pools.decode.engine.max_num_seqq=1"], ["pools.decode.engine.max_num_seqq", "max_num_seqs", "--set"]),
        (["pools.decode.replicas=-1"], ["pools.decode.replicas", "greater than or equal to 0", "-1"]),
        (["engine.dtype=1"], ["engine.dtype", "string", "got 1"]),
        (["kvtransfer.send_staging_bytes=3 apples"], ["kvtransfer.send_staging_bytes", "3 apples"]),
        (["pools.p.role=foo"], ["pools.p.role", "'prefill', 'decode' or 'colocated'", "foo"]),
        (["pools.Decode.role=decode"], ["pools.Decode", "lower-case"]),
        (["coordinator.restart_backoff_s=100"], ["coordinator", "restart_backoff_max_s"]),
        (["pools.prefill.replicas=0", "pools.decode.replicas=0"], ["pools", "at least one"]),
        (["engine=3"], ["engine", "got 3"]),
        (["pools.decode.engine.kind=simulated"], ["pools.decode.engine", "same for all pools"]),
        (["engine.max_num_seqs"], ["path=value"]),
        (["=3"], ["path=value"]),
        (["engine..seed=3"], ["path=value"]),
    ],
)
def test_refusals_name_the_path_and_the_origin(sets: list[str], words: list[str]) -> None:
    message = refused(sets=sets)
    for word in words:
        assert word in message


def test_every_problem_is_told_at_once() -> None:
    message = refused(sets=["engine.max_num_seq=3", "kvtransfer.default_transport=carrier-pigeon"])
    assert "engine.max_num_seq" in message
    assert "kvtransfer.default_transport" in message


def test_an_unknown_environment_key_is_refused_naming_the_variable() -> None:
    assert "environment SPLITPOINT__ENGINE__SEAD" in refused(environment={"SPLITPOINT__ENGINE__SEAD": "1"})


def test_an_unreadable_file_and_a_broken_one_are_named(tmp_path: Path) -> None:
    assert "absent.toml" in refused(file=tmp_path / "absent.toml")
    assert "not TOML" in refused(file=write(tmp_path, "engine = ["))


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().log_format = "json"  # type: ignore[misc]


def test_relative_paths_are_made_absolute() -> None:
    settings = load(environment={})
    assert settings.engine.model_path.is_absolute()
    assert settings.coordinator.state_dir.is_absolute()


@pytest.mark.parametrize("path", sorted((REPOSITORY / "deploy").glob("*.toml")), ids=lambda p: p.name)
def test_the_example_files_load(path: Path) -> None:
    assert load(path, environment={}).pools
