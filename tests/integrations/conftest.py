"""Ranks are forked from a server that has imported the packages too: seconds for each rank."""

import ranks

ranks.PRELOAD[:0] = ["transformers", "transformers.trainer", "trl.trainer.sft_trainer"]
