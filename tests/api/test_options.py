"""Options declared once: checks before anything is loaded, and every source that sets them."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import chairlift
from chairlift.cli.app import known_variables
from chairlift.cli.main import app
from chairlift.config import EngineConfig
from chairlift.errors import InvalidParameter
from chairlift.options import Option, options_of
from chairlift.server.config import ServerConfig
from chairlift.server.options import ServerOptions
from chairlift.server.process.engine_client import Supervision
from chairlift.server.wire.limits import Limits
from chairlift.terminal.options import EngineOptions

SERVE_OPTIONS = [option for group in (EngineOptions, ServerOptions) for option in options_of(group)]
DOCS = Path(__file__).parents[2] / "docs"
USING_VARIABLES = {".py", ".md", ".yaml", ".yml", ".toml", ".service", ".js", ".mjs"}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """Configs that `chairlift serve` passes to the server, which is not started."""
    configs: list[ServerConfig] = []

    async def record(config: ServerConfig, on_ready: object) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr("chairlift.server.lifecycle.serve_forever", record)
    return configs


def serve(*arguments: str, **variables: str) -> Any:
    return CliRunner().invoke(app, ["serve", *arguments], env={"COLUMNS": "200", **variables})


def wrong_value(option: Option) -> str | None:
    """Return an invalid value for the command line; None if every value of the type is valid."""
    if option.choices is not None:
        return "no-such-choice"
    return "-1" if option.check is not None else None


CHECKED = [option for option in SERVE_OPTIONS if option.on_command_line and wrong_value(option) is not None]


# ---- checks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", CHECKED, ids=lambda option: option.name)
def test_serve_refuses_a_wrong_value_before_it_starts_anything(option: Option, served: list[ServerConfig]) -> None:
    result = serve(f"{option.long_flag}={wrong_value(option)}")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {option.long_flag}: ")
    assert result.stderr.count("\n") == 1
    assert not served


def test_most_options_have_a_check() -> None:
    unchecked = {option.name for option in SERVE_OPTIONS if option.kind is not bool and option not in CHECKED}
    assert unchecked == {
        "seed",  # checked, but not on the command line
        "model",
        "host",
        "served_model_name",
        "files_dir",
        "responses_dir",
        "uds",
        "system_prompt",  # any text
        "ssl_certfile",
        "ssl_keyfile",
        "access_log",
        "otlp_traces_endpoint",
        "api_key",
        "api_key_file",
        "cors_origin",
        "allowed_host",
        "weight_cache",  # any folder
        "kv_disk",
        "lora_folder",
        "kv_events_topic",  # any text
        "access_log_salt",
        "classes",  # checked where they are parsed
    }


def test_a_wrong_value_is_refused_without_importing_torch() -> None:
    program = (
        "import sys, chairlift.cli.main\n"
        "try:\n    chairlift.cli.main.main()\nexcept SystemExit as ending:\n    code = ending.code\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else code)\n"
    )
    command = [sys.executable, "-c", program, "serve", "--dtype", "int3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: --dtype: unknown 'int3'; choose from auto, float32, bfloat16, float16\n"


@pytest.mark.parametrize("option", options_of(EngineConfig), ids=lambda option: option.name)
def test_a_value_of_the_wrong_type_is_refused(option: Option) -> None:
    with pytest.raises(InvalidParameter) as refusal:
        EngineConfig(**{option.name: object()})
    assert refusal.value.parameter == option.name


@pytest.mark.parametrize("option", options_of(EngineConfig), ids=lambda option: option.name)
def test_only_options_with_none_as_a_value_accept_it(option: Option) -> None:
    if option.optional:
        EngineConfig(**{option.name: None})
    else:
        with pytest.raises(InvalidParameter, match=f"^{option.name}: "):
            EngineConfig(**{option.name: None})


def test_defaults_of_the_server_are_those_of_its_config() -> None:
    defaults = {option.name: option.default for option in options_of(ServerOptions)}
    expected = {item.name: item.default for item in dataclasses.fields(ServerConfig)}
    for name in ("host", "port", "isolate_keys", "drain_timeout", "tool_format", "dashboard", "policy_switch"):
        assert defaults[name] == expected[name]
    assert defaults["max_waiting"] == Limits().max_waiting
    assert defaults["request_timeout"] == Limits().default_timeout
    assert defaults["step_timeout"] == Supervision().step_timeout
    assert defaults["heartbeat_timeout"] == Supervision().heartbeat_timeout


# ---- sources ----------------------------------------------------------------------------------------------------

YAML = """
model: some-model
max_num_seqs: 3
order: fair
tenant-weights: {alice: 2, bob: 0.5}
enforce_eager: true
target_tpot_ms: 30
kv_memory: 1073741824
port: 9000
cors_origin: ["https://a.example", "https://b.example"]
"""
TOML = """
model = "some-model"
max_num_seqs = 3
order = "fair"
tenant-weights = {alice = 2, bob = 0.5}
enforce_eager = true
target_tpot_ms = 30
kv_memory = 1073741824
port = 9000
cors_origin = ["https://a.example", "https://b.example"]
"""


@pytest.mark.parametrize(("name", "text"), [("c.yaml", YAML), ("c.yml", YAML), ("c.toml", TOML)])
def test_a_config_file_sets_options(name: str, text: str, tmp_path: Path, served: list[ServerConfig]) -> None:
    file = tmp_path / name
    file.write_text(text)
    result = serve("--config", str(file))
    assert result.exit_code == 0, result.output
    (config,) = served
    assert config.model == "some-model"
    assert config.port == 9000
    assert list(config.cors_origins) == ["https://a.example", "https://b.example"]
    expected = {"max_batch_requests": 3, "order": "fair", "cuda_graphs": False, "target_tpot_ms": 30.0}
    expected |= {"kv_memory": "1073741824", "tenant_weights": ["alice=2", "bob=0.5"]}
    assert {key: config.engine[key] for key in expected} == expected
    assert config.engine["max_overtakes"] == EngineConfig().max_overtakes


def test_a_config_file_sets_paths_and_lists(tmp_path: Path, served: list[ServerConfig]) -> None:
    (tmp_path / "keys").write_text("alice sk-1\n")
    text = f"api_key_file: {tmp_path / 'keys'}\naccess_log: '-'\nserved_model_name: [a, b]\napi_workers: 2\n"
    (tmp_path / "c.yaml").write_text(text)
    result = serve("--config", str(tmp_path / "c.yaml"))
    assert result.exit_code == 0, result.output
    (config,) = served
    assert (config.keys.file, config.access_log) == (tmp_path / "keys", Path("-"))
    assert (list(config.served_names), config.api_workers) == (["a", "b"], 2)
    (tmp_path / "c.yaml").write_text("api_key_file: 3\n")
    refused = serve("--config", str(tmp_path / "c.yaml"))
    assert "api_key_file: must be a path, got 3" in refused.stderr


def test_the_command_line_comes_before_variables_and_variables_before_the_file(
    tmp_path: Path, served: list[ServerConfig]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("max_batch_tokens: 100\nblock_size: 8\nmax_overtakes: 7\nprefix_caching: true\n")
    variables = {
        "CHAIRLIFT_MAX_BATCH_TOKENS": "200",
        "CHAIRLIFT_BLOCK_SIZE": "32",
        "CHAIRLIFT_PREFIX_CACHING": "false",
        "CHAIRLIFT_PORT": "",
    }
    result = serve("--config", str(file), "--max-batch-tokens", "300", **variables)
    assert result.exit_code == 0, result.output
    engine = served[0].engine
    assert (engine["max_batch_tokens"], engine["block_size"], engine["max_overtakes"]) == (300, 32, 7)
    assert engine["prefix_caching"] is False
    assert served[0].port == 8000


@pytest.mark.parametrize("option", CHECKED, ids=lambda option: option.name)
def test_a_wrong_value_of_a_variable_is_refused_by_its_name(option: Option, served: list[ServerConfig]) -> None:
    variable = f"CHAIRLIFT_{option.name.upper()}"
    result = serve(**{variable: str(wrong_value(option))})
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {variable}: ")
    assert not served


def test_a_variable_that_is_not_a_number_is_named() -> None:
    result = serve(CHAIRLIFT_BLOCK_SIZE="some")
    assert result.exit_code == 2
    assert "CHAIRLIFT_BLOCK_SIZE" in result.stderr


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("c.yaml", "colour: red", "colour: is not an option"),
        ("c.yaml", "dtype: int3", "dtype: unknown 'int3'"),
        ("c.toml", "max_batch_tokens = 'some'", "max_batch_tokens: must be an integer, got 'some'"),
        ("c.toml", "prefix_caching = 1", "prefix_caching: must be true or false, got 1"),
        ("c.yaml", "cors_origin: '*'", "cors_origin: must be a list of texts"),
        ("c.yaml", "max_num_seqs: 1\nmax_batch_requests: 1", "max_batch_requests: max_batch_requests is given twice"),
        ("c.yaml", "max-batch-requests: 1\nmax_batch_requests: 2", "max_batch_requests: is given twice"),
        ("c.yaml", "tensor_parallel_size: 2", "tensor_parallel_size: 2 is not supported"),
        ("c.yaml", "- a\n- b", "must map names to values"),
        ("c.yaml", "a: [", "is not YAML"),
        ("c.toml", "a = ", "is not TOML"),
        ("c.ini", "", "must end in .yaml, .yml or .toml"),
        ("missing.yaml", None, "cannot read"),
    ],
)
def test_errors_in_a_config_file_name_the_file_and_the_key(
    name: str, text: str | None, problem: str, tmp_path: Path, served: list[ServerConfig]
) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    result = serve("--config", str(file))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --config: ")
    assert str(file) in result.stderr
    assert problem in result.stderr
    assert not served


def test_option_names_of_vllm_work_on_the_command_line(served: list[ServerConfig]) -> None:
    arguments = ["--max-num-seqs", "4", "--max-num-batched-tokens=99", "--gpu-memory-utilization", "0.5"]
    result = serve(*arguments, "--enforce-eager", "--kv-cache-dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    expected = {"max_batch_requests": 4, "max_batch_tokens": 99, "memory_share": 0.5, "cuda_graphs": False}
    assert {name: served[0].engine[name] for name in expected} == expected
    assert served[0].engine["kv_dtype"] == "bfloat16"


def test_a_private_key_needs_a_certificate(served: list[ServerConfig]) -> None:
    result = serve("--ssl-keyfile", "key.pem")
    assert (result.exit_code, result.stderr) == (
        2,
        "error: --ssl-keyfile: needs a certificate; give it with --ssl-certfile\n",
    )
    assert not served


@pytest.mark.parametrize(
    ("arguments", "levels"),
    [
        ([], ("info", "warning")),
        (["--verbose"], ("info", "info")),
        (["--quiet"], ("error", "error")),
        (["--quiet", "--log-level", "debug"], ("debug", "debug")),
    ],
    ids=str,
)
def test_the_log_level_depends_on_quiet_and_verbose_unless_given(
    arguments: list[str], levels: tuple[str, str], served: list[ServerConfig]
) -> None:
    assert serve(*arguments).exit_code == 0
    assert (served[0].log_level, served[0].engine_log_level) == levels


# ---- completion and documentation -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("chairlift ser", ["serve"]),
        ("chairlift serve --dty", ["--dtype"]),
        ("chairlift serve --help=ac", ["access"]),
        ("chairlift serve --dtype b", ["bfloat16"]),
        ("chairlift bench thr", ["throughput"]),
        ("chairlift bench throughput --policy st", ["static"]),
    ],
)
def test_a_shell_completes_commands_options_and_choices(words: str, expected: list[str]) -> None:
    protocol = {"_CHAIRLIFT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    command = [sys.executable, "-m", "chairlift"]
    done = subprocess.run(command, env=os.environ | protocol, capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected


def test_what_is_generated_from_the_options_is_up_to_date(tmp_path: Path) -> None:
    committed = [DOCS / "options.md", Path(chairlift.__file__).with_name("engine_keywords.py")]
    written = [tmp_path / file.name for file in committed]
    # In a separate process, since other tests register choices in this one.
    subprocess.run([sys.executable, "-m", "chairlift.cli.options_page", *written], check=True)
    for file, new in zip(committed, written, strict=True):
        assert file.read_text() == new.read_text(), "run `make options-page`"


# ---- variables --------------------------------------------------------------------------------------------------


def test_an_unknown_variable_gives_a_warning_with_a_suggestion(served: list[ServerConfig]) -> None:
    result = serve(CHAIRLIFT_MAX_BATCH_TOKEN="200")
    assert (result.exit_code, len(served)) == (0, 1)
    assert result.stderr == (
        "warning: CHAIRLIFT_MAX_BATCH_TOKEN is not a variable of Chairlift, and has no effect; "
        "did you mean CHAIRLIFT_MAX_BATCH_TOKENS?\n"
    )
    assert "docs/options.md lists all" in serve(CHAIRLIFT_ZZZZ="").stderr
    assert serve("--quiet", CHAIRLIFT_ZZZZ="").stderr == ""


def test_a_misspelled_key_does_not_open_the_server(served: list[ServerConfig]) -> None:
    result = serve(CHAIRLIFT_API_KEYS="secret")
    assert result.exit_code == 2
    assert result.stderr == (
        "error: CHAIRLIFT_API_KEYS: is not a variable of Chairlift; did you mean CHAIRLIFT_API_KEY?\n"
    )
    assert not served


def test_variables_of_kubernetes_are_ignored(served: list[ServerConfig]) -> None:
    service = {"SERVICE_HOST": "10.0.0.1", "SERVICE_PORT": "80", "SERVICE_PORT_HTTP": "80", "PORT": "tcp://10.0.0.1:80"}
    service |= {"PORT_80_TCP": "tcp://10.0.0.1:80", "PORT_80_TCP_ADDR": "10.0.0.1"}
    assert serve(**{f"CHAIRLIFT_BATCH_{name}": value for name, value in service.items()}).exit_code == 0
    assert "CHAIRLIFT_BATCH_PORT is not a variable" in serve(CHAIRLIFT_BATCH_PORT="tcp://10.0.0.1:80").stderr


def test_all_variables_that_the_repository_uses_are_known() -> None:
    wrong = {
        "CHAIRLIFT_API_KEYS",
        "CHAIRLIFT_MAX_BATCH_TOKEN",
        "CHAIRLIFT_ZZZZ",
        "CHAIRLIFT_BATCH_PORT",
        "CHAIRLIFT_COMPLETE",
    }
    folders = [DOCS.parent / name for name in ("src", "tests", "docs", "examples", "deploy")]
    files = [file for folder in folders for file in folder.rglob("*") if file.suffix in USING_VARIABLES]
    used = {name for file in files for name in re.findall(r"\bCHAIRLIFT_[A-Z_]*[A-Z]\b", file.read_text())}
    assert used - known_variables() <= wrong
