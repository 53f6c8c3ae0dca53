"""Operations along rows on the CPU."""
