//! Where a reply ends: RESP2 and RESP3 framing, so that a reply is parsed only when all of it has arrived.

/// The length of the first whole reply in `bytes`, or none if it has not arrived yet.
pub(crate) fn length(bytes: &[u8]) -> Option<usize> {
    let line = bytes.windows(2).position(|pair| pair == b"\r\n")?;
    let header = line + 2;
    let count = || std::str::from_utf8(bytes.get(1..line)?).ok()?.parse::<usize>().ok();
    match bytes.first()? {
        b'$' | b'=' | b'!' => match count() {
            Some(length) => Some(header + length + 2).filter(|&end| end <= bytes.len()),
            None => Some(header),
        },
        b'*' | b'~' | b'>' => elements(bytes, header, count().unwrap_or(0)),
        b'%' => elements(bytes, header, 2 * count().unwrap_or(0)),
        // Attributes stand before the reply that they belong to.
        b'|' => elements(bytes, header, 2 * count().unwrap_or(0) + 1),
        _ => Some(header),
    }
}

fn elements(bytes: &[u8], start: usize, count: usize) -> Option<usize> {
    (0..count).try_fold(start, |end, _| Some(end + length(bytes.get(end..)?)?))
}

#[cfg(test)]
mod tests {
    use super::length;

    #[test]
    fn a_reply_is_whole_only_with_its_last_byte() {
        let replies: [&[u8]; 10] = [
            b"+OK\r\n",
            b":42\r\n",
            b"$5\r\na\r\nbc\r\n",
            b"$-1\r\n",
            b"*-1\r\n",
            b"*2\r\n$1\r\na\r\n*1\r\n:1\r\n",
            b"%1\r\n+key\r\n~2\r\n:1\r\n:2\r\n",
            b"_\r\n",
            b"|1\r\n+a\r\n+b\r\n:1\r\n",
            b"-ERR no\r\n",
        ];
        for reply in replies {
            for cut in 0..reply.len() {
                assert_eq!(length(&reply[..cut]), None, "{:?} cut at {cut}", String::from_utf8_lossy(reply));
            }
            let followed = [reply, b"+NEXT\r\n"].concat();
            assert_eq!(length(&followed), Some(reply.len()));
        }
    }
}
