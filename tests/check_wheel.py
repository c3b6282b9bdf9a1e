"""Checks a built wheel and sdist in a fresh environment: `python tests/check_wheel.py DIST_DIR`."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PROBE = """
import importlib.util, sys
import lorajax, lorajax.kernels_pallas, lorajax.sharding, lorajax.runtime
assert importlib.util.find_spec("sharding") is None, "a bare top-level sharding package"
assert importlib.util.find_spec("kernels_pallas") is None, "a bare top-level kernels_pallas package"
assert lorajax.kernels_pallas.__file__.startswith(sys.path[0]), lorajax.kernels_pallas.__file__
print("wheel ok:", lorajax.LoraSpec.__name__)
"""


def main(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    (sdist,) = dist.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert tops == {"lorajax"}, f"the wheel must hold one top-level package; got {sorted(tops)}"
    for name in ("py.typed", "kernels_pallas/gpu/tiles/nvidia-h200.json"):
        assert f"lorajax/{name}" in names, f"the wheel must hold lorajax/{name}"
    for archive in (wheel, sdist):
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "target"
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            subprocess.run([*pip, "--target", target, archive.resolve()], check=True)
            # First on the path: the editable install of the checkout must not answer.
            code = f"import sys; sys.path.insert(0, {str(target)!r})\n{PROBE}"
            subprocess.run([sys.executable, "-c", code], check=True, cwd=folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
