"""Why rows are dropped, in addition to the reasons that a format gives with `Dropped`."""

CANNOT_BE_USED = "cannot be used"
FULLY_MASKED = "fully masked"
TOO_LONG = "longer than max_seq_len"
HELD_OUT = "held out for validation"
FOR_TRAINING = "left for training"
EQUAL = "chosen equal to rejected"
EQUAL_AS_CUT = "chosen equal to rejected as far as they fit"  # followed by the limit
LEFT_OUT = "left out by "  # followed by the user's function

ELSEWHERE = (HELD_OUT, FOR_TRAINING)  # of rows that are used, but not in this dataset
SHARED_LIMIT = "all answers to a prompt share max_seq_len, each counted with its prompt: raise it"
