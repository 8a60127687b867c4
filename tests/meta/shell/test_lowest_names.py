"""`.ci/lowest_names.py` finds the names that the lowest versions lack, but those that a file may do without."""

import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]

WHEEL = {
    "torch/__init__.py": "from torch._C import *\nfrom torch import nn\n",
    "torch/_C/__init__.pyi": "def compiled_function() -> None: ...\n",
    "torch/nn/__init__.py": "class Module: ...\n",
    "torch/settings.py": "use_shapes = True\ninstall_config_module(sys.modules[__name__])\n",
    "torch/utils/_config_module.py": "class ConfigModule:\n    def patch(self): ...\n",
    "torch/nn/flex.py": "def flex_attention(query): ...\n",
    "transformers/__init__.py": "from .utils import _LazyModule\n",
    "transformers/models.py": "class OldModel: ...\n",
}

PRODUCT = """
import torch
import transformers
import torch.settings as settings
from torch.nn import Module, flex
from transformers import NewModel, OldModel

try:
    from torch.nn import Excused
except ImportError:
    Excused = None

if hasattr(transformers, "LaterModel"):
    from transformers.models.later import LaterLayer
    LAYERS = transformers.LaterConfig, LaterLayer
else:
    LAYERS = transformers.OtherConfig

def run(query):
    torch.compiled_function()
    torch.newer_function()
    settings.patch(use_shapes=settings.later_setting)
    if hasattr(flex, "AuxRequest"):
        flex.AuxRequest()
    return flex.flex_attention(query) + flex.later(query)
"""


@pytest.fixture
def checker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lowest_names", ROOT / ".ci" / "lowest_names.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_name_of_a_later_version_is_found(
    checker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker, "ROOT", tmp_path)
    for name in checker.PACKAGES:
        with zipfile.ZipFile(tmp_path / f"{name}-1.whl", "w") as wheel:
            for file, text in WHEEL.items():
                if file.startswith(name):
                    wheel.writestr(file, text)
    (tmp_path / "product.py").write_text(PRODUCT)
    wheels = {name: checker.Wheel(tmp_path / f"{name}-1.whl") for name in checker.PACKAGES}
    missing = checker.missing_names(wheels, [tmp_path / "product.py"])
    assert [(use.module, use.name) for use in missing] == [
        ("transformers", "NewModel"),
        ("transformers", "OtherConfig"),
        ("torch", "newer_function"),
        ("torch.settings", "later_setting"),
        ("torch.nn.flex", "later"),
    ]
    assert missing[2].place == "product.py:21"
