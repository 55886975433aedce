"""words.py: a tokenizer of a few words, for trainers that want one."""

import functools

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trainings import VOCABULARY


@functools.cache
def words() -> list[str]:
    """All words but the special ones."""
    return [f"w{number}" for number in range(VOCABULARY - 4)]


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *words()])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def sentence(first: int, length: int) -> str:
    return " ".join(words()[(first * 7 + place * 11) % len(words())] for place in range(length))
