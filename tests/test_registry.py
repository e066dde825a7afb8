"""Choices are found by name: in the package, when registered, and in plugins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chairlift import registry as registry_module
from chairlift.core.policies.base import POLICIES
from chairlift.errors import InvalidParameter
from chairlift.registry import Registry
from tests.api.cli_runner import run

PACKAGE = "chairlift_example_choices"


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry[type]:
    folder = tmp_path / PACKAGE
    folder.mkdir()
    (folder / "__init__.py").write_text(
        f"from chairlift.registry import Registry\nCHOICES = Registry('colour', '{PACKAGE}')\n"
    )
    (folder / "base.py").write_text("raise AssertionError('base is no choice')\n")
    (folder / "dark_red.py").write_text(
        f"from {PACKAGE} import CHOICES\n@CHOICES.register('dark-red')\nclass DarkRed: ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        monkeypatch.delitem(sys.modules, name)
    module = __import__(PACKAGE)
    return module.CHOICES  # type: ignore[no-any-return]


def test_a_module_of_the_package_is_found_by_name_and_imported_on_first_use(registry: Registry[type]) -> None:
    assert registry.names() == ("dark-red",)
    assert f"{PACKAGE}.dark_red" not in sys.modules
    assert registry.get("dark-red").__name__ == "DarkRed"


def test_a_registered_object_is_a_choice(registry: Registry[type]) -> None:
    registry.register("blue")(int)
    assert registry.names() == ("blue", "dark-red")
    assert registry.get("blue") is int
    with pytest.raises(ValueError, match="'blue' is registered twice"):
        registry.register("blue")(str)


def test_a_name_of_the_package_cannot_be_taken(registry: Registry[type]) -> None:
    with pytest.raises(ValueError, match="'dark-red' is a choice of chairlift_example_choices"):
        registry.register("dark-red")(int)
    assert registry.get("dark-red").__name__ == "DarkRed"


def test_a_choice_has_the_name_of_its_registration(registry: Registry[type]) -> None:
    with pytest.raises(ValueError, match="'blue' calls itself 'green'"):
        registry.register("blue")(type("Blue", (), {"name": "green"}))
    assert registry.register("blue")(type("Blue", (), {"name": "blue"})).__name__ == "Blue"


def test_an_unknown_name_raises_with_all_choices(registry: Registry[type]) -> None:
    with pytest.raises(InvalidParameter, match="unknown colour 'green'; choose from dark-red") as raised:
        registry.get("green")
    assert raised.value.parameter == "colour"


def run_with_plugins(plugins: str, program: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CHAIRLIFT_PLUGINS": plugins}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)


def test_a_file_named_by_the_environment_variable_adds_a_choice(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text("from chairlift.text import TOYS\nTOYS.register('top')(int)\n")
    program = (
        "import chairlift.text; from chairlift.registry import Registry;"
        "chairlift.text.TOYS = Registry('toy', 'chairlift.client'); print(chairlift.text.TOYS.get('top'))"
    )
    assert run_with_plugins(str(plugin), program).stdout == "<class 'int'>\n"


@pytest.mark.parametrize("missing", ["no_such_module", "no/such/file.py"])
def test_a_missing_plugin_is_an_error_that_names_the_variable(missing: str) -> None:
    program = "from chairlift.registry import load_plugins; load_plugins()"
    assert "CHAIRLIFT_PLUGINS" in run_with_plugins(missing, program).stderr


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("from chairlift.core.policies.base import POLICIES\nPOLICIES.register('half')(int)\n1 / 0", "line 3"),
        (
            "from chairlift.models.families import Family\n\nFamily(title='Toy', norm_kind='rmsnorm')",
            "plugin.py, line 3",  # not the line of the check
        ),
        ("x = = 3", "invalid syntax (plugin.py, line 1)"),
        ("x = '\0'", "null bytes"),
        ("import no_such_module", "No module named 'no_such_module'"),
        (None, "there is no such file"),
    ],
)
def test_a_broken_plugin_is_one_line_of_every_command(
    source: str | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = tmp_path / "plugin.py"
    if source is not None:
        plugin.write_text(source)
    monkeypatch.setenv("CHAIRLIFT_PLUGINS", str(plugin))
    own_choices = dict(POLICIES._registered)
    for command in ("models", "serve"):
        monkeypatch.setattr(registry_module, "_plugins", registry_module._Plugins())
        registry_module._import_plugins.cache_clear()
        result = run(command)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: CHAIRLIFT_PLUGINS: cannot import '{plugin}': ")
        assert problem in result.stderr
        assert result.stderr.count("\n") == 1
        with pytest.raises(InvalidParameter, match="cannot import"):  # not "registered twice"
            POLICIES.names()
        POLICIES._registered.clear()
        POLICIES._registered.update(own_choices)
    registry_module._import_plugins.cache_clear()


def test_a_plugin_that_registers_nothing_gives_a_warning(tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text("class Forgotten: ...")
    (tmp_path / "busy.py").write_text(
        "from chairlift.core.policies.base import POLICIES, Policy\n"
        '@POLICIES.register("busy")\nclass Busy(Policy):\n    name = "busy"'
    )
    program = "from chairlift.registry import idle_plugins; print(*idle_plugins())"
    listed = run_with_plugins(f"{tmp_path / 'idle.py'},{tmp_path / 'busy.py'}", program).stdout
    assert listed.strip() == str(tmp_path / "idle.py")


def test_the_files_of_plugins_are_listed(tmp_path: Path) -> None:
    package = tmp_path / "some_plugins"
    package.mkdir()
    for name in ("__init__", "colours", "sizes"):
        (package / f"{name}.py").write_text("from chairlift.registry import load_plugins; load_plugins()")
    (tmp_path / "alone.py").write_text("")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from chairlift.registry import plugin_sources;"
        "print(*(file.name for file in plugin_sources()))"
    )
    listed = run_with_plugins(f"some_plugins, {tmp_path / 'alone.py'}", program).stdout
    assert listed.split() == ["__init__.py", "colours.py", "sizes.py", "alone.py"]
