"""Trained models read back from a results folder, each with the data that it was trained on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jemlib import data, images, runs
from jemlib.checkpoints import CheckpointError
from jemlib.data import DataError, Dataset
from jemlib.energy import JEM
from jemlib.files import ResultsError
from jemlib.results import Store


@dataclass(frozen=True)
class Trained:
    """A model of a methods' table. Where the run diverged, the weights are those of its last good checkpoint."""

    run: str
    method: str
    seed: int
    status: str
    model: JEM = field(repr=False)
    dataset: Dataset = field(repr=False)

    @property
    def name(self) -> str:
        """What the tables call the model: data set, method and seed."""
        return f"{self.dataset.name}-{self.method}-s{self.seed}"

    def row(self) -> dict[str, Any]:
        """The columns that tell in a table which model a row is about, `run` aside."""
        about = {"method": self.method, "seed": self.seed, "status": self.status}
        return {"model": self.name, "data_source": self.dataset.source} | about


def read(
    store: Store, tables: Iterable[str], *, data_dir: str | Path = "", image_folder: str = "", n_val: int, n_test: int
) -> tuple[list[Trained], list[str]]:
    """The models that the tables name, and a sentence for each table or run that cannot be used.

    tables: names such as "mnist_methods"; their column `run` names records and checkpoints. The data are loaded again
    with n_val validation images, which no run may have trained on, and n_test test images (0: all), and must be those
    of the record. Raises ResultsError where no model is left.
    """
    found: list[Trained] = []
    missing: list[str] = []
    loaded: dict[tuple[str, int], Dataset] = {}
    for table in tables:
        try:
            names = store.read_table(table)["run"]
        except ResultsError:
            missing.append(f"tables/{table}.csv: no notebook has written it to this results folder")
            continue
        for name in names:
            try:
                model, record = runs.load_model(store, name), store.read_record(name)
                key = record["data"]["name"], record["n_train"]
                if key not in loaded:
                    sizes = {"n_train": key[1], "n_val": n_val, "n_test": n_test}
                    loaded[key] = _load(key[0], data_dir, image_folder, sizes)
                if loaded[key].id != f"{key[0]}:{record['data']['checksum']}:{key[1]}":
                    raise DataError(f"the data here ({loaded[key].source}) are not those that it was trained on")
            except (ResultsError, CheckpointError, DataError) as error:
                missing.append(f"{name}: {error}")
                continue
            config = record["config"]
            store.uses([name])
            found.append(Trained(name, config["method"], config["seed"], record["status"], model, loaded[key]))
    if not found:
        raise ResultsError(f"There is no trained model to evaluate in {store.dir}: {'; '.join(missing)}.")
    return found, missing


def _load(name: str, data_dir: str | Path, image_folder: str, sizes: dict[str, int]) -> Dataset:
    if name in ("MNIST", "FashionMNIST"):
        return data.mnist(data_dir, name=name, **sizes)
    if image_folder:
        return images.image_folder(image_folder, **sizes)
    return images.cifar10(data_dir, **sizes)
