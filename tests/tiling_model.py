"""The tables of `kernels.tiling` in plain Python."""

from itertools import accumulate, pairwise


def clamp(x, low, high):
    return max(low, min(x, high))


def model(q, k, align, block_rows):
    """Documents as (q_start, q_len, k_start, k_len, k_valid) -> the tables that Tiling documents."""
    documents, q_tiles, k_tiles, work = [], [], [], []
    for n, ((q_start, q_len), (k_start, k_len, k_valid)) in enumerate(zip(q, k, strict=True)):
        diagonal = {"none": 1 << 29, "top_left": 0, "bottom_right": k_valid - q_len}[align]
        documents.append([q_start, q_len, k_start, k_len, k_valid, len(q_tiles), len(k_tiles), diagonal])
        first = len(k_tiles)
        q_tiles += [n] * -(-q_len // 128)
        k_tiles += [n] * -(-k_len // 128)
        for block in range(-(-q_len // block_rows)):
            rows = min(block_rows, q_len - block * block_rows)
            limit = diagonal + block * block_rows
            tiles = -(-clamp(rows + limit, 0, k_valid) // 128)
            work.append((-tiles, n, block, [q_start + block * block_rows, rows, k_start, k_valid, first, limit, max(tiles, 1), n]))
    return documents, q_tiles, k_tiles, [entry[-1] for entry in sorted(work, key=lambda entry: entry[:3])]


def packed_lengths(cu, tokens, valid):
    cu = list(accumulate((clamp(x, 0, tokens) for x in cu), max))
    bounds = [*pairwise(cu), (cu[-1], tokens)]
    rows = [(start, stop - start) for start, stop in bounds]
    if not valid:
        return rows
    return [(*row, 0 if n == len(rows) - 1 else row[1]) for n, row in enumerate(rows)]
