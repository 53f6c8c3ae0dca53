"""Real sentences through real models: which outputs change with the batch, and which do not.

Run it with ``python -m isogemm.demo``. It reads the weights of all-MiniLM-L6-v2, embeds sentences alone, in batches and
with the linears one token at a time, with NumPy's products and with isogemm's, and compares bits. Then it asks
SmolLM2-135M-Instruct questions, alone and together, and compares words.
"""
