//! Bytes that clients send: parses numbers in them, and makes them printable.

/// Parses a number in the server's own notation: at most 19 decimal digits, no sign, no leading zeros.
pub fn parse_number(bytes: &[u8]) -> Option<u64> {
    let digit = |byte: &u8| byte.is_ascii_digit().then(|| u64::from(byte.wrapping_sub(b'0')));
    match bytes {
        [] | [b'0', _, ..] => None,
        _ if bytes.len() > 19 => None,
        // Nineteen digits can't overflow.
        _ => bytes.iter().try_fold(0_u64, |number, byte| Some(number.wrapping_mul(10).wrapping_add(digit(byte)?))),
    }
}

/// Makes bytes printable: escapes them as `redis-cli` does.
pub fn show(bytes: &[u8]) -> String {
    bytes.escape_ascii().to_string()
}

/// How many bytes of a client's input an error message shows.
const SHOWN: usize = 128;

/// Like [`show`], but shows only the first 128 bytes, followed by `...` if there are more.
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

    /// The number that the server would read.
    fn expected(text: &str) -> Option<u64> {
        let number: u64 = text.parse().ok()?;
        (number.to_string() == text && text.len() <= 19).then_some(number)
    }

    #[test]
    fn parse_number_checks_every_byte() {
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
        fn parse_number_reads_every_number_of_up_to_19_digits(number: u64, digits in 1_u32..=19) {
            let number = number % 10_u64.pow(digits);
            prop_assert_eq!(parse_number(number.to_string().as_bytes()), Some(number));
        }
    }
}
