"""`--layout NAME,latent`: latent rows of a checkpoint, or one line that says why not."""

import json
from pathlib import Path

import pytest

from specverify.checkpoints.sessions import PAGE, layout_of
from specverify.cli import main
from specverify.reference.architecture import Checkpoint
from specverify.reference.layout import KvLayout
from specverify.setup.errors import UnusableInput
from specverify.setup.selection import Unknown, check_latent, check_layout, kind_of
from tests.checkpoints import save_checkpoint


def of_type(folder: Path, model_type: str) -> Checkpoint:
    """A checkpoint of which only the family is known."""
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return Checkpoint(str(folder), "0" * 64, 10, 100)


def test_latent_rows_are_a_word_behind_the_layout(tmp_path: Path) -> None:
    for kind in ("deepseek_v2", "deepseek_v3", "kimi_k2"):
        deepseek = of_type(tmp_path, kind)
        assert layout_of("paged,latent", deepseek) == KvLayout(kind="paged", page_size=PAGE, latent=True)
        assert layout_of("branch,latent", deepseek) == KvLayout("fast", latent=True)
        assert layout_of("branch", deepseek) == layout_of(None, deepseek) == KvLayout("fast")
    assert kind_of("paged,latent") == kind_of("paged") == "paged"


@pytest.mark.parametrize("kind", ["llama", "strange"])
def test_a_family_without_latent_rows_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    plain = of_type(tmp_path, kind)
    assert layout_of("paged", plain).latent is False
    with pytest.raises(
        UnusableInput, match=f"--layout paged,latent: .* is of model_type '{kind}', which has no"
    ) as why:
        layout_of("paged,latent", plain)
    assert "(deepseek_v3 and kimi_k2 and deepseek_v2 and deepseek_v32 and glm_moe_dsa have them)" in str(why.value)
    assert "\n" not in str(why.value)


def test_a_backend_without_latent_rows_and_a_run_without_a_checkpoint_are_refused() -> None:
    check_layout("paged,latent", ("cpu-eager",), latent=True)
    with pytest.raises(Unknown, match="paged,latent needs --model"):
        check_layout("paged,latent", ("cpu-eager",))
    with pytest.raises(Unknown, match="no KV layout is called 'pagged'"):
        check_layout("pagged,latent", (), latent=True)
    check_latent("paged", "plain", ())
    check_latent("paged,latent", "able", ("poison", "latent"))
    with pytest.raises(Unknown, match="plain declares no latent rows, which paged,latent asks for"):
        check_latent("paged,latent", "plain", ("poison",))


@pytest.mark.slow
def test_a_checkpoint_is_judged_over_latent_rows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = str(save_checkpoint("deepseek-v3", tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["diff", "--model", folder, "--layout", "paged,latent", "--cases", "1", "--new-tokens", "4"])
    out, err = capfd.readouterr()
    assert ended.value.code == 0, out + err
    assert "AGREE" in out
