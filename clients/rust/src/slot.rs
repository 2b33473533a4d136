//! The slot of a key, as every cluster computes it.

pub(crate) const SLOTS: u16 = 16_384;

/// The slot of a key: that of the text in its first pair of braces, if that is not empty.
pub(crate) fn slot(key: &[u8]) -> u16 {
    crc16(tag(key)) % SLOTS
}

fn tag(key: &[u8]) -> &[u8] {
    let braces = || {
        let open = key.iter().position(|byte| *byte == b'{')?;
        let inside = key.get(open + 1..)?;
        let close = inside.iter().position(|byte| *byte == b'}')?;
        inside.get(..close).filter(|tag| !tag.is_empty())
    };
    braces().unwrap_or(key)
}

/// CRC-16/XMODEM, as the specification of Redis Cluster names it.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(
            crc ^ (u16::from(*byte) << 8),
            |crc, _| {
                if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 }
            },
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_match_cluster_specification() {
        assert_eq!(crc16(b"123456789"), 0x31C3);
        assert_eq!(slot(b"foo"), 12_182);
        assert_eq!(slot(b"{foo}:bar"), slot(b"foo"));
        assert_eq!(slot(b"a{foo}{bar}"), slot(b"foo"));
        assert_ne!(slot(b"{}foo"), slot(b"foo"));
        assert_eq!(slot(b"{}foo"), crc16(b"{}foo") % SLOTS);
        assert_eq!(slot(b"{foo"), crc16(b"{foo") % SLOTS);
        assert_eq!(slot(b""), 0);
    }
}
