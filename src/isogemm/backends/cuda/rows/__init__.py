"""Operations along rows on CUDA."""
