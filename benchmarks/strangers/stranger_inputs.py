"""Makers of inputs for strangers' scripts: data of real sizes; of models, config and tokenizer alone.

``python stranger_inputs.py WORKING MAKER ARGUMENTS...`` in the folder of the script. A maker leaves alone what is
there. Everything is random or counted; nothing is fetched, and no value matters but sizes and formats.
"""

import base64
import csv
import datetime
import gzip
import hashlib
import importlib
import json
import pickle
import random
import shlex
import shutil
import string
import struct
import subprocess
import sys
import wave
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

RANDOM = np.random.default_rng(0)
WORDS = [
    f"{start}{middle}{end}" for start in "bdfglmnprst" for middle in ("a", "e", "i", "o", "ou") for end in "dlmnrst"
]
CLASSES = 1000


def sentence(chooser, low=6, high=24):
    return " ".join(chooser.choices(WORDS, k=chooser.randint(low, high))).capitalize() + "."


def picture(path, width, height, mode="RGB"):
    """An image of coarse blocks: random pixels would make large files."""
    coarse = RANDOM.integers(0, 256, (max(1, height // 16), max(1, width // 16), 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(coarse).resize((width, height)).convert(mode).save(path)


def sparse_weights(path, shapes, kind, each):
    """A file of weights of the right size, which takes no room: they are zero."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        size = each * int(np.prod(shape))
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + at)


def link(source, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.hardlink_to(source)


class Makers:
    """One method a maker, with the words that follow its name in the list."""

    def __init__(self, working):
        self.working = Path(working)

    # Images

    def mnist(self, folder, name="MNIST"):
        """The four files of MNIST or FashionMNIST, as torchvision lays them."""
        raw = Path(folder) / name / "raw"
        raw.mkdir(parents=True, exist_ok=True)
        for part, count in (("train", 60000), ("t10k", 10000)):
            images = struct.pack(">IIII", 2051, count, 28, 28) + RANDOM.bytes(count * 784)
            labels = struct.pack(">II", 2049, count) + (np.arange(count) % 10).astype(np.uint8).tobytes()
            for kind, data in (("images-idx3", images), ("labels-idx1", labels)):
                path = raw / f"{part}-{kind}-ubyte"
                if not path.exists():
                    path.write_bytes(data)
                (raw / f"{path.name}.gz").touch()  # old scripts look for it

    def cifar10(self, folder):
        self._cifar(Path(folder) / "cifar-10-batches-py", [f"data_batch_{n}" for n in range(1, 6)] + ["test_batch"])

    def cifar100(self, folder):
        self._cifar(Path(folder) / "cifar-100-python", ["train", "test"], fine=True)

    def _cifar(self, folder, names, fine=False):
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            count = 50000 if name == "train" else 10000
            classes = 100 if fine else 10
            labels = [index % classes for index in range(count)]
            data = np.frombuffer(RANDOM.bytes(count * 3072), dtype=np.uint8).reshape(count, 3072)
            label = {"fine_labels": labels, "coarse_labels": labels} if fine else {"labels": labels}
            (folder / name).write_bytes(
                pickle.dumps({"data": data, "filenames": [f"{n}.png" for n in range(count)], **label})
            )
        named = [f"class{n}" for n in range(100 if fine else 10)]
        meta = {"fine_label_names": named, "coarse_label_names": named} if fine else {"label_names": named}
        (folder / ("meta" if fine else "batches.meta")).write_bytes(pickle.dumps(meta))

    def imagenet(self, folder, train="train", val="val", each="3"):
        """Folders of 1000 classes with photos of 500x375, few of them different."""
        root = Path(folder)
        photos = [root / "photos" / f"{n}.JPEG" for n in range(16)]
        for photo in photos:
            picture(photo, 500, 375)
        for part, count in ((train, int(each)), (val, 1)):
            for index in range(CLASSES):
                for n in range(count):
                    name = f"n{index:08d}"
                    link(photos[(index + n) % 16], root / part / name / f"{name}_{n}.JPEG")

    def classes(self, folder, names, each, width, height):
        """A folder of images for each name."""
        for name in names.split(","):
            self.images(f"{folder}/{name}", each, width, height)

    def images(self, folder, count, width, height, pattern="{:06d}.jpg", mode="RGB"):
        """A flat folder of images, few of them different."""
        for n in range(int(count)):
            path = Path(folder) / pattern.format(n)
            if path.exists():
                continue
            if n < 8:
                picture(path, int(width), int(height), mode)
            else:
                link(Path(folder) / pattern.format(n % 8), path)

    def carvana(self, folder, count, width, height):
        """Images, and masks of the same names with another ending."""
        self.images(f"{folder}/imgs", count, width, height)
        for n in range(int(count)):
            path = Path(folder) / "masks" / f"{n:06d}_mask.gif"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((RANDOM.random((int(height), int(width))) > 0.5).astype(np.uint8)).save(path)

    def coco(self, folder, count="64", annotations="instances"):
        """Images of 640x480 with boxes, polygons and captions of COCO 2017."""
        root = Path(folder)
        (root / "annotations").mkdir(parents=True, exist_ok=True)
        categories = [{"id": n, "name": f"class{n}", "supercategory": "thing"} for n in range(1, 91)]
        for part in ("train2017", "val2017"):
            self.images(str(root / part), count, "640", "480", "{:012d}.jpg")
            images, boxes = [], []
            for n in range(int(count)):
                images.append({"id": n, "file_name": f"{n:012d}.jpg", "width": 640, "height": 480})
                for k in range(7):
                    x, y = 20 + 70 * k, 15 + 50 * k
                    polygon = [[x, y, x + 90, y, x + 90, y + 80, x, y + 80]]
                    box = {"id": len(boxes) + 1, "image_id": n, "category_id": 1 + (n + k) % 80, "iscrowd": 0}
                    boxes.append(box | {"bbox": [x, y, 90, 80], "area": 7200, "segmentation": polygon})
            text = json.dumps({"images": images, "annotations": boxes, "categories": categories})
            (root / "annotations" / f"{annotations}_{part}.json").write_text(text)

    def font(self):
        """A font where YOLO's download would lie."""
        import matplotlib

        path = Path.home() / ".config" / "Ultralytics" / "Arial.ttf"
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf", path)

    def yolo(self, folder, count, width="640", height="480", parts="train2017,val2017"):
        """Images and labels as YOLO reads them, and lists of them."""
        root = Path(folder)
        for part in parts.split(","):
            self.images(str(root / "images" / part), count, width, height, "{:012d}.jpg")
            (root / "labels" / part).mkdir(parents=True, exist_ok=True)
            for n in range(int(count)):
                lines = [f"{(n + k) % 80} {0.15 + 0.1 * k:.2f} {0.15 + 0.1 * k:.2f} 0.12 0.12" for k in range(7)]
                (root / "labels" / part / f"{n:012d}.txt").write_text("\n".join(lines))
            listing = "".join(f"./images/{part}/{n:012d}.jpg\n" for n in range(int(count)))
            (root / f"{part}.txt").write_text(listing)

    def celeba(self, folder, count="2100"):
        """Faces of 178x218, and the table of their forty attributes."""
        self.images(f"{folder}/images", count, 178, 218)
        known = ["Black_Hair", "Blond_Hair", "Brown_Hair", "Male", "Young"]
        names = known + [f"Attribute_{n}" for n in range(35)]
        rows = (f"{n:06d}.jpg " + " ".join("1" if (n + k) % 3 else "-1" for k in range(40)) for n in range(int(count)))
        (Path(folder) / "list_attr_celeba.txt").write_text("\n".join([str(count), " ".join(names), *rows]) + "\n")

    def blender(self, folder, parts="train:100,val:100,test:200"):
        """Views of 800x800 with their cameras, as NeRF's synthetic scenes have them."""
        root = Path(folder)
        for part, count in (one.split(":") for one in parts.split(",")):
            self.images(str(root / part), count, 800, 800, "r_{}.png", "RGBA")
            frames = [
                {"file_path": f"./{part}/r_{n}", "rotation": 0.01, "transform_matrix": np.eye(4).tolist()}
                for n in range(int(count))
            ]
            (root / f"transforms_{part}.json").write_text(json.dumps({"camera_angle_x": 0.69, "frames": frames}))

    def zipped(self, path, count, size, classes="10"):
        """An archive of images with a class each, as EDM's and StyleGAN's tools write it."""
        path = Path(path)
        if path.exists():
            return
        self.images(str(path.parent / "images"), 8, size, size, "{}.png")
        with zipfile.ZipFile(path, "w") as archive:
            names = [f"00000/img{n:08d}.png" for n in range(int(count))]
            for n, name in enumerate(names):
                archive.write(path.parent / "images" / f"{n % 8}.png", name)
            labels = [[name, n % int(classes)] for n, name in enumerate(names)]
            archive.writestr("dataset.json", json.dumps({"labels": labels}))

    # Text

    def lines(self, path, *parts):
        """A text of these words, with a new line for each ``|``."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(" ".join(parts).replace("|", "\n") + "\n")

    def replaced(self, path, old, new):
        """A file of the checkout with one word for another, where its README asks for that."""
        Path(path).write_text(Path(path).read_text("utf-8").replace(old, new))

    def packed(self, path, count):
        """So many letters, compressed."""
        with gzip.open(path, "wb") as stream:
            stream.write(RANDOM.integers(97, 123, int(count), dtype=np.uint8).tobytes())

    def hourly(self, path, count="17420"):
        """A CSV file of seven columns by the hour, as ETT has them."""
        path, begin = Path(path), datetime.datetime(2016, 7, 1, tzinfo=datetime.UTC)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(["date", "HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT"])
            for n in range(int(count)):
                hour = (begin + datetime.timedelta(hours=n)).strftime("%Y-%m-%d %H:%M:%S")
                writer.writerow([hour, *(f"{value:.3f}" for value in RANDOM.random(7))])

    def words(self, path, count, kinds="33278"):
        """Text of so many words, of so many kinds."""
        path = Path(path)
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn = np.minimum(RANDOM.zipf(1.2, int(count)), int(kinds) - 1)
        drawn[: int(kinds)] = np.arange(int(kinds))
        lines = (" ".join(f"w{word}" for word in drawn[at : at + 24]) for at in range(0, int(count), 24))
        path.write_text("\n".join(lines) + "\n")

    def text(self, path, lines):
        """Lines of sentences."""
        path, chooser = Path(path), random.Random(0)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            letters = "".join(map(chr, range(32, 127)))  # each of them once: scripts ask for letters that text has
            path.write_text(letters + "\n" + "".join(sentence(chooser) + "\n" for _ in range(int(lines))))

    def tokens(self, path, count, vocabulary, dtype="uint16", header=""):
        """A file of token numbers; ``header`` is the magic number of llm.c."""
        path = Path(path)
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        data = RANDOM.integers(0, int(vocabulary), int(count)).astype(dtype)
        first = np.zeros(256, dtype=np.int32)
        if header:
            first[:3] = int(header), 1, int(count)
        if path.suffix == ".npy":
            np.save(path, data)
        else:
            path.write_bytes((first.tobytes() if header else b"") + data.tobytes())

    def characters(self, path, count):
        """The vocabulary of nanoGPT's data of characters."""
        letters = [chr(32 + n) for n in range(int(count))]
        places = {letter: n for n, letter in enumerate(letters)}
        Path(path).write_bytes(
            pickle.dumps({"vocab_size": int(count), "itos": dict(enumerate(letters)), "stoi": places})
        )

    def alpaca(self, path, count="2000"):
        """Instructions with an input and an answer."""
        path, chooser = Path(path), random.Random(0)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = [
                {
                    "instruction": sentence(chooser),
                    "input": sentence(chooser) if n % 3 else "",
                    "output": " ".join(sentence(chooser) for _ in range(4)),
                }
                for n in range(int(count))
            ]
            path.write_text(json.dumps(rows))

    def table(self, path, columns, count="500"):
        """A CSV file of ``name:kind`` columns: ``text``, ``number`` or a count of classes."""
        path, chooser = Path(path), random.Random(0)
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        pairs = [column.split(":") for column in columns.split(",")]
        with path.open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow([name for name, _ in pairs])
            writer.writerows([[cell(kind, n, chooser) for _, kind in pairs] for n in range(int(count))])

    def texts(self, path, count):
        """Lines of JSON with a text each, as C4 has them."""
        path, chooser = Path(path), random.Random(0)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps({"text": " ".join(sentence(chooser) for _ in range(20))}) for _ in range(int(count)))
        path.write_text("\n".join(lines) + "\n")

    def captions(self, folder, count):
        """A table of pictures with five captions each, as Flickr8k has them."""
        chooser = random.Random(0)
        Path(folder).mkdir(parents=True, exist_ok=True)
        with (Path(folder) / "captions.csv").open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(["id", "image", "caption"])
            writer.writerows([n, f"{n:06d}.jpg", sentence(chooser)] for n in range(int(count)) for _ in range(5))

    def bought(self, path, people, things, each):
        """Lines of a person's and a thing's number, in the order of time."""
        rows = [
            f"{who} {what}" for who in range(1, int(people) + 1) for what in RANDOM.integers(1, int(things), int(each))
        ]
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text("\n".join(rows) + f"\n1 {things}\n")

    def finetuning(self, path, count, longest="120"):
        """Lines of JSON with numbers of tokens: what is given, and what completes it."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as stream:
            for _ in range(int(count)):
                given, rest = (RANDOM.integers(0, 50000, RANDOM.integers(10, int(longest))).tolist() for _ in range(2))
                stream.write(json.dumps({"context": given, "completion": rest}) + "\n")

    def encoded(self, path, count, vocabulary):
        """A tensor of token numbers."""
        import torch

        Path(path).parent.mkdir(parents=True, exist_ok=True)
        torch.save(torch.from_numpy(RANDOM.integers(1000, int(vocabulary), int(count))), path)

    def two_sentences(self, path, count):
        """Lines of two sentences with a tab between them, of 30 000 words."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        at = (np.arange(int(count) * 16) % 30000).reshape(int(count), 2, 8)
        path.write_text("\n".join("\t".join(" ".join(f"w{n}" for n in one) for one in two) for two in at) + "\n")

    def prepared(self, *words):
        """What a script of the repository itself prepares."""
        subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)

    def state(self, path, model, key=""):
        """Weights of a model of the checkout, ``module:name:argument=value,...``, under a key where one is named."""
        import torch

        module, name, given = model.split(":")
        sys.path.insert(0, ".")
        pairs = (pair.split("=") for pair in given.split(",") if pair)
        made = getattr(importlib.import_module(module), name)(
            **{word: int(value) for word, value in pairs}
        ).state_dict()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        torch.save({key: made} if key else made, path)

    def gpt2_medium(self, path):
        """Weights of GPT-2 medium in a file of PyTorch."""
        import torch
        from transformers import GPT2Config, GPT2Model

        if not Path(path).exists():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with torch.device("meta"):
                made = GPT2Model(GPT2Config(n_embd=1024, n_layer=24, n_head=16)).to_empty(device="cpu")
            torch.save(made.state_dict(), path)

    def hellaswag(self, folder):
        """Beginnings with four endings each, as HellaSwag's file has them."""
        folder, chooser = Path(folder), random.Random(0)
        folder.mkdir(parents=True, exist_ok=True)
        for part in ("train", "val", "test"):
            rows = [
                {"ctx": sentence(chooser), "label": n % 4, "endings": [sentence(chooser) for _ in range(4)]}
                for n in range(100)
            ]
            (folder / f"hellaswag_{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def readme(self, source, target, number):
        """The script that a README shows as its block of Python of that number, from 0."""
        blocks = Path(source).read_text("utf-8").split("```python\n")[1:]
        Path(target).write_text(blocks[int(number)].partition("```")[0])

    # Graphs

    def cora(self, folder):
        """Papers with 1433 words, a label and citations."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        labels = [f"Topic_{n}" for n in range(7)]
        with (folder / "cora.content").open("w") as stream:
            for n in range(2708):
                has = (RANDOM.random(1433) < 0.0127).astype(int)
                stream.write("\t".join([str(n), *map(str, has), labels[n % 7]]) + "\n")
        pairs = RANDOM.integers(0, 2708, (5429, 2))
        (folder / "cora.cites").write_text("".join(f"{a}\t{b}\n" for a, b in pairs))

    def planetoid(self, folder, name):
        """Cora as Planetoid's files have it."""
        import scipy.sparse

        raw = Path(folder) / name / "raw"
        raw.mkdir(parents=True, exist_ok=True)
        parts = {"x": 140, "tx": 1000, "allx": 1708}
        for part, count in parts.items():
            matrix = scipy.sparse.random(count, 1433, 0.0127, format="csr", dtype=np.float32, random_state=0)
            labels = np.eye(7, dtype=np.int32)[np.arange(count) % 7]
            for key, value in ((part, matrix), (part.replace("x", "y"), labels)):
                (raw / f"ind.{name.lower()}.{key}").write_bytes(pickle.dumps(value))
        graph = {n: RANDOM.integers(0, 2708, 2).tolist() for n in range(2708)}
        (raw / f"ind.{name.lower()}.graph").write_bytes(pickle.dumps(graph))
        (raw / f"ind.{name.lower()}.test.index").write_text("".join(f"{n}\n" for n in range(1708, 2708)))

    # Points, molecules and particles

    def shapenet(self, folder, each="8"):
        """Clouds of 2600 points of sixteen kinds, with a number for each point, as ShapeNet's parts are."""
        root = Path(folder)
        kinds = (
            "Airplane Bag Cap Car Chair Earphone Guitar Knife Lamp Laptop Motorbike Mug Pistol Rocket Skateboard Table"
        )
        offsets = {kind: f"{2691156 + n:08d}" for n, kind in enumerate(kinds.split())}
        (root / "train_test_split").mkdir(parents=True, exist_ok=True)
        (root / "synsetoffset2category.txt").write_text("".join(f"{kind}\t{at}\n" for kind, at in offsets.items()))
        clouds, parts = root / "cloud.pts", root / "cloud.seg"
        np.savetxt(clouds, RANDOM.normal(size=(2600, 3)), fmt="%.5f")
        np.savetxt(parts, 1 + np.arange(2600) % 4, fmt="%d")
        for part, count in (("train", int(each)), ("val", 1), ("test", 2)):
            names = [f"shape_data/{at}/{part}{n}" for at in offsets.values() for n in range(count)]
            for name in names:
                _, at, cloud = name.split("/")
                link(clouds, root / at / "points" / f"{cloud}.pts")
                link(parts, root / at / "points_label" / f"{cloud}.seg")
            (root / "train_test_split" / f"shuffled_{part}_file_list.json").write_text(json.dumps(names))

    def modelnet(self, folder, each="8"):
        """Clouds of 10 000 points with normals, of forty classes, as texts."""
        root = Path(folder)
        names = [f"class{n}" for n in range(40)]
        root.mkdir(parents=True, exist_ok=True)
        (root / "modelnet40_shape_names.txt").write_text("\n".join(names))
        np.savetxt(root / "cloud.txt", RANDOM.normal(size=(10000, 6)), fmt="%.5f", delimiter=",")
        for part, count in (("train", int(each)), ("test", 2)):
            clouds = [f"{name}_{part}{n}" for name in names for n in range(count)]
            for cloud in clouds:
                link(root / "cloud.txt", root / cloud.rpartition("_")[0] / f"{cloud}.txt")
            (root / f"modelnet40_{part}.txt").write_text("\n".join(clouds))

    def modelnet_arrays(self, folder):
        """Clouds of 2048 points of forty classes, in files of HDF5."""
        import h5py

        root = Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        for part, count in (("train", 1024), ("test", 128)):
            with h5py.File(root / f"ply_data_{part}0.h5", "w") as stream:
                stream["data"] = RANDOM.normal(size=(count, 2048, 3)).astype("<f4")
                stream["label"] = (np.arange(count) % 40).astype("u1")[:, None]

    def particles(self, folder, count="3000", steps="49"):
        """Ways of five charged particles, as EGNN's generator writes them."""
        root = Path(folder)
        for part in ("train", "valid", "test"):
            ways = {
                "loc": RANDOM.normal(size=(int(count), int(steps), 3, 5)),
                "vel": RANDOM.normal(size=(int(count), int(steps), 3, 5)),
                "edges": RANDOM.choice([-1.0, 1.0], size=(int(count), 5, 5)),
                "charges": RANDOM.choice([-1.0, 1.0], size=(int(count), 5, 1)),
            }
            for name, values in ways.items():
                np.save(root / f"{name}_{part}_charged5_initvel1small.npy", values)

    def proteins(self, folder, count="300"):
        """Proteins of one chain of 100 to 500 residues, as ProteinMPNN's training set has them."""
        import torch

        root, chooser = Path(folder), random.Random(0)
        lines = ["CHAINID,DEPOSITION,RESOLUTION,HASH,CLUSTER,SEQUENCE"]
        for n in range(int(count)):
            name, length = f"1{n:03d}", chooser.randint(100, 500)
            place = root / "pdb" / name[1:3]
            place.mkdir(parents=True, exist_ok=True)
            letters = "".join(chooser.choices("ACDEFGHIKLMNPQRSTVWY", k=length))
            chain = {"seq": letters, "xyz": torch.randn(length, 14, 3), "mask": torch.ones(length, 14) > 0}
            torch.save(chain | {"bfac": torch.ones(length, 14), "occ": torch.ones(length, 14)}, place / f"{name}_A.pt")
            known = {"method": "X", "date": "2020-01-01", "resolution": 2.0, "chains": ["A"], "tm": torch.ones(1, 1, 3)}
            sets = {"asmb_ids": ["1"], "asmb_details": ["author"], "asmb_method": ["PISA"], "asmb_chains": ["A"]}
            torch.save(known | sets | {"asmb_xform0": torch.eye(4)[None]}, place / f"{name}.pt")
            lines.append(f"{name}_A,2020-01-01,2.0,{n:06d},{n},{letters}")
        (root / "list.csv").write_text("\n".join(lines) + "\n")
        for file, first in (("valid_clusters.txt", 0), ("test_clusters.txt", 20)):
            (root / file).write_text("".join(f"{n}\n" for n in range(first, first + 20)))

    def burgers(self, path):
        """Solutions of Burgers' equation on a grid of 128 places and 101 times, as a file of MATLAB."""
        from scipy.io import savemat

        solved = {"input": RANDOM.normal(size=(1000, 128)), "output": RANDOM.normal(size=(1000, 101, 128))}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        savemat(path, solved | {"visc": 0.01})

    # Sound

    def sounds(self, folder, count, seconds, rate="22050"):
        """Wave files of noise."""
        for n in range(int(count)):
            path = Path(folder) / f"LJ{n // 100:03d}-{n % 100:04d}.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                with wave.open(str(path), "wb") as stream:
                    stream.setnchannels(1)
                    stream.setsampwidth(2)
                    stream.setframerate(int(rate))
                    frames = int(float(seconds) * int(rate))
                    stream.writeframes(RANDOM.integers(-3000, 3000, frames).astype("<i2").tobytes())

    def speech(self, folder, rate, seconds, *lists):
        """Wave files for the names that lists of speech have before their first ``|``."""
        first = Path(folder) / "made" / "LJ000-0000.wav"
        self.sounds(str(first.parent), "1", seconds, rate)
        for listed in lists:
            for line in Path(listed).read_text("utf-8").splitlines():
                link(first, Path(folder) / f"{line.partition('|')[0]}.wav")

    # Models and data sets of hubs

    def model(self, name):
        """Config and tokenizer of a model, as the hub's cache holds them."""
        import stranger_hub

        stranger_hub.model(self.working, name)

    def data(self, name, count="512"):
        """A data set, as the cache of ``datasets`` holds it."""
        import stranger_hub

        stranger_hub.data(self.working, name, int(count))

    def metric(self, name, gives=""):
        """A metric of two columns, as the cache of ``evaluate`` holds one that was loaded before.

        Accuracy, or a half, whatever it is asked, for each name in ``gives``; for each class where it is per class.
        """
        compute = [
            "    def _compute(self, predictions, references):",
            "        return {'accuracy': sum(a == b for a, b in zip(predictions, references)) / len(references)}",
        ]
        if gives:
            each = (f"{one!r}: {'np.full(35, 0.5)' if one.startswith('per_') else 0.5}" for one in gives.split(","))
            compute = [
                "    def add_batch(self, **_):",
                "        'Nothing.'",
                "    def compute(self, *, predictions=None, references=None, **_):",
                "        'A half of each.'",
                f"        return {{{', '.join(each)}}}",
            ]
        lines = [
            "import datasets",
            "import evaluate",
            "import numpy as np",
            "class Agreement(evaluate.Metric):",
            "    def _info(self):",
            "        kinds = {name: datasets.Value('int64') for name in ('predictions', 'references')}",
            "        features = datasets.Features(kinds)",
            "        return evaluate.MetricInfo(description='', citation='', inputs_description='', features=features)",
            *compute,
        ]
        metrics = self.working / "hf" / "modules" / "evaluate_modules" / "metrics"
        folder = metrics / f"evaluate-metric--{name}" / ("0" * 64)
        folder.mkdir(parents=True, exist_ok=True)
        for package in (folder, *list(folder.parents)[:3]):
            (package / "__init__.py").touch()
        (folder / f"{name}.py").write_text("\n".join(lines) + "\n")

    def punkt(self):
        """The sentence splitter of NLTK, where its download would lie, without what it learned."""
        folder = Path.home() / "nltk_data" / "tokenizers"
        (folder / "punkt").mkdir(parents=True, exist_ok=True)
        (folder / "punkt_tab" / "english").mkdir(parents=True, exist_ok=True)
        for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
            (folder / "punkt_tab" / "english" / name).touch()

    def data_file(self, name, file, kinds):
        """A file of JSON in a data set's repository: numbers and names of its classes."""
        import stranger_hub

        folder = stranger_hub.folder_of(self.working, name, "datasets")
        (folder / file).write_text(json.dumps({str(n): f"class{n}" for n in range(int(kinds))}))

    def tagged(self, path, count="600"):
        """Lines of JSON with words and a tag of each."""
        path, chooser = Path(path), random.Random(0)
        if not path.exists():
            rows = (sentence(chooser, 8, 60).split() for _ in range(int(count)))
            tags = [f"{place}-{kind}" for place in "BI" for kind in ("PER", "ORG", "LOC", "MISC")] + ["O"]
            lines = (json.dumps({"tokens": row, "ner_tags": [tags[n % 9] for n in range(len(row))]}) for row in rows)
            path.write_text("\n".join(lines) + "\n")

    def local(self, name, folder):
        """Config and tokenizer of a model in a folder."""
        import stranger_hub

        source = stranger_hub.model(self.working, name)
        if not Path(folder).exists():
            shutil.copytree(source, folder)

    def llama3_folder(self, folder):
        """Llama 3.2 1B as it is downloaded: config, tokenizer, and weights in a sparse file that takes no room."""
        folder = Path(folder)
        (folder / "original").mkdir(parents=True, exist_ok=True)
        ranks = [bytes([n]) for n in range(256)] + [f"~{n}".encode() for n in range(128000 - 256)]
        lines = (f"{base64.b64encode(word).decode()} {n}\n" for n, word in enumerate(ranks))
        (folder / "original" / "tokenizer.model").write_text("".join(lines))
        width, inner, groups = 2048, 8192, 512
        config = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 128256,
            "hidden_size": width,
            "intermediate_size": inner,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "tie_word_embeddings": True,
        }
        (folder / "config.json").write_text(json.dumps(config))
        shapes = {"model.embed_tokens.weight": [128256, width], "model.norm.weight": [width]}
        for n in range(16):
            layer = {
                "self_attn.q_proj": [width, width],
                "self_attn.k_proj": [groups, width],
                "self_attn.v_proj": [groups, width],
                "self_attn.o_proj": [width, width],
                "mlp.gate_proj": [inner, width],
                "mlp.up_proj": [inner, width],
                "mlp.down_proj": [width, inner],
                "input_layernorm": [width],
                "post_attention_layernorm": [width],
            }
            shapes |= {f"model.layers.{n}.{name}.weight": shape for name, shape in layer.items()}
        sparse_weights(folder / "model.safetensors", shapes, "BF16", 2)

    def lit_checkpoint(self, name, folder):
        """A checkpoint of LitGPT, which makes it itself."""
        import stranger_hub
        import torch
        from litgpt import GPT, Config
        from litgpt.utils import save_config

        folder = Path(folder)
        if not folder.exists():
            shutil.copytree(stranger_hub.model(self.working, f"EleutherAI/{name}"), folder)
            save_config(Config.from_name(name), folder)
            torch.save(GPT(Config.from_name(name)).state_dict(), folder / "lit_model.pth")

    def nanochat(self):
        """Shards of text, and a tokenizer of 32 768 tokens."""
        import pandas
        import tiktoken
        import torch

        root = Path.home() / ".cache" / "nanochat"
        (root / "tokenizer").mkdir(parents=True, exist_ok=True)
        (root / "base_data_climbmix").mkdir(exist_ok=True)
        names = [
            "bos",
            "user_start",
            "user_end",
            "assistant_start",
            "assistant_end",
            "python_start",
            "python_end",
            "output_start",
            "output_end",
        ]
        ranks = {bytes([n]): n for n in range(256)} | {f"~{n}".encode(): n for n in range(256, 32768 - len(names))}
        special = {f"<|{name}|>": len(ranks) + n for n, name in enumerate(names)}
        made = tiktoken.Encoding("made", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens=special)
        (root / "tokenizer" / "tokenizer.pkl").write_bytes(pickle.dumps(made))
        torch.save(torch.ones(32768, dtype=torch.int32), root / "tokenizer" / "token_bytes.pt")
        chooser = random.Random(0)
        for n in range(2):
            texts = [" ".join(sentence(chooser) for _ in range(chooser.randint(5, 60))) for _ in range(4000)]
            pandas.DataFrame({"text": texts}).to_parquet(
                root / "base_data_climbmix" / f"shard_{n:05d}.parquet", row_group_size=500
            )

    def gpt2_tokens(self):
        """GPT-2's merges, 50 000, in the cache of tiktoken: of letters and digits, two and three."""
        folder = self.working / "tiktoken"
        folder.mkdir(parents=True, exist_ok=True)
        signs = string.ascii_letters + string.digits
        pairs = [(a, b) for a in signs for b in signs]
        merges = [*pairs, *((a + b, c) for a, b in pairs for c in signs)][:50_000]
        plain = [n for n in range(256) if chr(n).isprintable() and chr(n) != " "]
        letters = [chr(n) for n in plain] + [chr(256 + n) for n in range(256 - len(plain))]
        words = [*letters, *(a + b for a, b in merges), "<|endoftext|>"]
        bpe = "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges)
        address = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
        for name, text in {
            "vocab.bpe": bpe,
            "encoder.json": json.dumps({word: n for n, word in enumerate(words)}),
        }.items():
            (folder / hashlib.sha1((address + name).encode()).hexdigest()).write_text(text)

    def pretrained(self, name, file):
        """Weights of a model of torchvision, where its download would lie."""
        import torch
        import torchvision

        path = self.working / "torch" / "hub" / "checkpoints" / file
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            # The network that compares images by their features has 1008 classes and one head.
            more = {"num_classes": 1008, "aux_logits": False, "init_weights": False} if "pt_inception" in file else {}
            torch.save(getattr(torchvision.models, name)(**more).state_dict(), path)

    def hub_repository(self, name):
        """A repository of torch.hub that a script lists the models of, without any."""
        folder = self.working / "torch" / "hub" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hubconf.py").touch()


def cell(kind, n, chooser):
    match kind:
        case "text":
            return sentence(chooser)
        case "number":
            return f"{chooser.random():.3f}"
        case "id":
            return n
        case _:
            return n % int(kind)


def main():
    working, name, *arguments = sys.argv[1:]
    getattr(Makers(working), name)(
        *(part for argument in arguments for part in shlex.split(argument.replace("{W}", working)))
    )


if __name__ == "__main__":
    main()
