"""Model folders for pods: a ConfigMap with the files of a small one, and a pool that serves it."""

import base64
from pathlib import Path
from typing import Any


def config_map(name: str, folder: Path) -> dict[str, Any]:
    files = {key: base64.b64encode((folder / path).read_bytes()).decode() for key, path in keys(folder).items()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "binaryData": files}


def pool(name: str, folder: Path) -> dict[str, Any]:
    """Values of a pool that serves the folder of ConfigMap `name` as the model `name`."""
    items = [{"key": key, "path": path} for key, path in keys(folder).items()]
    return {
        "model": "/model",
        "servedModelName": name,
        "volumes": [{"name": "folder", "configMap": {"name": name, "items": items}}],
        "volumeMounts": [{"name": "folder", "mountPath": "/model", "readOnly": True}],
    }


def keys(folder: Path) -> dict[str, str]:
    """The relative path of each file by its key in the ConfigMap, which has no slash."""
    paths = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.replace("/", "__"): path for path in paths}
