//! Bytes that clients send: numbers in them, and how to show them.

/// The number that bytes stand for, in the server's own notation: decimal digits, no sign, no leading zeros, at most
/// 19 of them.
pub fn parse_number(bytes: &[u8]) -> Option<u64> {
    if bytes.is_empty() || bytes.len() > 19 || (bytes.len() > 1 && bytes.first() == Some(&b'0')) {
        return None;
    }
    let (eights, rest) = bytes.as_chunks();
    let mut number = 0_u64;
    for eight in eights {
        number = number.wrapping_mul(100_000_000).wrapping_add(eight_digits(*eight)?);
    }
    for byte in rest {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        number = number.wrapping_mul(10).wrapping_add(u64::from(digit));
    }
    Some(number)
}

/// The number that eight decimal digits stand for. A token has 16, and every release reads one: taken as one word, eight
/// digits cost what two cost one by one.
fn eight_digits(text: [u8; 8]) -> Option<u64> {
    const EACH: u64 = 0x0101_0101_0101_0101;
    let text = u64::from_le_bytes(text);
    // The upper half of a digit's byte is 3, and is still 3 when 6 is added.
    let are_3 = |halves: u64| halves & (0xf0 * EACH) == 0x30 * EACH;
    if !(are_3(text) && are_3(text.wrapping_add(6 * EACH))) {
        return None;
    }
    // The first digit is in the lowest byte. Neighbours are joined to numbers of two digits, of four, of eight.
    let ones = text & (0x0f * EACH);
    let twos = ones.wrapping_mul(10).wrapping_add(ones >> 8) & 0x00ff_00ff_00ff_00ff;
    let fours = twos.wrapping_mul(100).wrapping_add(twos >> 16) & 0x0000_ffff_0000_ffff;
    Some(fours.wrapping_mul(10_000).wrapping_add(fours >> 32) & 0xffff_ffff)
}

/// Bytes made printable, escaped as `redis-cli` does it.
pub fn show(bytes: &[u8]) -> String {
    bytes.escape_ascii().to_string()
}

/// How many bytes of a client's input an error shows.
const SHOWN: usize = 128;

/// Like [`show`], but only the beginning.
pub fn show_start(bytes: &[u8]) -> String {
    match bytes.get(..SHOWN) {
        Some(start) if bytes.len() > SHOWN => format!("{}...", show(start)),
        _ => show(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What the server would read.
    fn expected(text: &str) -> Option<u64> {
        let number: u64 = text.parse().ok()?;
        (number.to_string() == text && text.len() <= 19).then_some(number)
    }

    #[test]
    fn every_byte_in_every_place_is_looked_at() {
        for length in 1..=20 {
            for place in 0..length {
                for byte in 0..=u8::MAX {
                    let mut text = vec![b'1'; length];
                    text[place] = byte;
                    let read = std::str::from_utf8(&text).ok().and_then(expected);
                    assert_eq!(parse_number(&text), read, "{}", show(&text));
                }
            }
        }
        assert_eq!(parse_number(b""), None);
    }

    proptest! {
        #[test]
        fn numbers_are_read_as_they_are_written(number: u64, digits in 1_u32..=19) {
            let number = number % 10_u64.pow(digits);
            prop_assert_eq!(parse_number(number.to_string().as_bytes()), Some(number));
        }
    }
}
