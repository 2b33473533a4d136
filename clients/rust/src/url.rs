//! Addresses as text: the URLs of the `redis` crate, and two more forms, for a cluster and for Sentinel.

use redis::sentinel::{SentinelClientBuilder, SentinelServerType};
use redis::{Client, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisResult, TlsMode};

use crate::error::Error;

const FORMS: &str = "redis://[user:password@]host[:port][/database], rediss://…, unix:///path, \
                     redis+cluster://[user:password@]host[:port][,host…], \
                     redis+sentinel://[user:password@]host[:port][,host…]/master[/database][?sentinel_password=…[&sentinel_user=…]]";

/// A parsed address.
pub(crate) enum Address {
    One(Client),
    Sentinel { builder: Box<SentinelClientBuilder>, hosts: String, primary: String, database: i64 },
    Cluster(Vec<ConnectionInfo>),
}

#[cfg(feature = "tls")]
impl Address {
    /// The same, reached with these certificates.
    pub(crate) fn with_certificates(self, certificates: redis::TlsCertificates) -> RedisResult<Self> {
        let with = |info: ConnectionInfo| Client::build_with_tls(info, certificates.clone());
        match self {
            Self::One(client) => with(client.get_connection_info().clone()).map(Self::One),
            Self::Cluster(nodes) => {
                let nodes = nodes.into_iter().map(|node| Ok(with(node)?.get_connection_info().clone()));
                nodes.collect::<RedisResult<_>>().map(Self::Cluster)
            }
            Self::Sentinel { builder, hosts, primary, database } => {
                let builder = builder.set_client_to_redis_certificates(certificates.clone());
                let builder = Box::new(builder.set_client_to_sentinel_certificates(certificates));
                Ok(Self::Sentinel { builder, hosts, primary, database })
            }
        }
    }
}

/// Parses an address.
pub(crate) fn parse(url: &str) -> Result<Address, Error> {
    let invalid =
        |why: &str| Error::Invalid { message: format!("{:?}: {why}; allowed: {FORMS}", without_password(url)) };
    let (scheme, rest) = url.split_once("://").ok_or_else(|| invalid("no URL"))?;
    let parsed = match scheme.split_once('+') {
        Some((scheme @ ("redis" | "rediss" | "valkey" | "valkeys"), "cluster")) => {
            cluster(scheme, rest).map(Address::Cluster)
        }
        Some((scheme @ ("redis" | "rediss" | "valkey" | "valkeys"), "sentinel")) => {
            let named = rest.split_once('/').filter(|(_, path)| path.starts_with(|first| !"/?".contains(first)));
            let (hosts, path) = named.ok_or_else(|| invalid("no name of a master"))?;
            sentinel(scheme, hosts, path)
        }
        _ => Client::open(url).map(Address::One),
    };
    parsed.map_err(|error| invalid(&error.to_string()))
}

/// The same without logins and options, for messages: either may contain a password.
pub(crate) fn without_password(url: &str) -> String {
    let (scheme, rest) = url.split_at(url.find("://").map_or(0, |end| end + "://".len()));
    match (rest.rfind('@'), rest.find('?')) {
        // A password that is not encoded, of the login or of the Sentinels.
        (Some(login), Some(options)) if options < login => format!("{scheme}***"),
        (login, options) => {
            let hosts = &rest[login.unwrap_or(0)..options.unwrap_or(rest.len())];
            let hidden = |part: Option<usize>| if part.is_some() { "***" } else { "" };
            format!("{scheme}{}{hosts}{}", hidden(login), hidden(options))
        }
    }
}

fn cluster(scheme: &str, rest: &str) -> RedisResult<Vec<ConnectionInfo>> {
    each_host(scheme, rest, "")
}

/// The login before the hosts is the primary's. Sentinels have their own, if any, behind the path.
fn sentinel(scheme: &str, hosts: &str, path: &str) -> RedisResult<Address> {
    let (path, options) = path.split_once('?').unwrap_or((path, ""));
    let (primary, database) = path.split_once('/').unwrap_or((path, ""));
    let nodes = each_host(scheme, hosts, &format!("/{database}"))?;
    let addresses: Vec<ConnectionAddr> = nodes.iter().map(|node| node.addr().clone()).collect();
    let login = nodes.first().map(|node| node.redis_settings().clone()).unwrap_or_default();
    let mut builder = SentinelClientBuilder::new(addresses, primary, SentinelServerType::Master)?
        .set_client_to_redis_db(login.db())
        .set_client_to_redis_protocol(login.protocol());
    if let Some(user) = login.username() {
        builder = builder.set_client_to_redis_username(user);
    }
    if let Some(password) = login.password() {
        builder = builder.set_client_to_redis_password(password);
    }
    if scheme == "rediss" || scheme == "valkeys" {
        builder = builder.set_client_to_redis_tls_mode(TlsMode::Secure);
    }
    let builder = Box::new(sentinel_login(builder, options)?);
    let hosts = nodes.iter().map(|node| node.addr().to_string()).collect::<Vec<_>>().join(",");
    Ok(Address::Sentinel { builder, hosts, primary: primary.to_owned(), database: login.db() })
}

fn sentinel_login(builder: SentinelClientBuilder, options: &str) -> RedisResult<SentinelClientBuilder> {
    let (mut user, mut password) = ("", "");
    for option in options.split('&').filter(|option| !option.is_empty()) {
        match option.split_once('=') {
            Some(("sentinel_user", value)) => user = value,
            Some(("sentinel_password", value)) => password = value,
            _ => return Err((redis::ErrorKind::InvalidClientConfig, "no such option of an address").into()),
        }
    }
    if password.is_empty() {
        return Ok(builder);
    }
    // A URL's parts are encoded; its parser decodes them.
    let login = format!("redis://{user}:{password}@sentinel").into_connection_info()?.redis_settings().clone();
    let builder = match login.username() {
        Some(user) => builder.set_client_to_sentinel_username(user),
        None => builder,
    };
    Ok(match login.password() {
        Some(password) => builder.set_client_to_sentinel_password(password),
        None => builder,
    })
}

/// One address for each host, all with the login before the first and the path behind the last.
fn each_host(scheme: &str, rest: &str, path: &str) -> RedisResult<Vec<ConnectionInfo>> {
    let (login, hosts) = match rest.rsplit_once('@') {
        Some((login, hosts)) => (format!("{login}@"), hosts),
        None => (String::new(), rest),
    };
    let hosts = hosts.trim_end_matches('/').split(',');
    hosts.map(|host| format!("{scheme}://{login}{host}{path}").into_connection_info()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cluster_address_lists_hosts_with_one_login() {
        let Ok(Address::Cluster(nodes)) = parse("redis+cluster://me:secret@a:7000,b:7001") else { panic!() };
        let addresses: Vec<_> = nodes.iter().map(|node| node.addr().to_string()).collect();
        assert_eq!(addresses, ["a:7000", "b:7001"]);
        assert!(nodes.iter().all(|node| node.redis_settings().password() == Some("secret")));
    }

    #[test]
    fn sentinel_needs_the_name_of_a_primary() {
        assert!(matches!(
            parse("redis+sentinel://a:26379,b:26380/mymaster/2"),
            Ok(Address::Sentinel { database: 2, .. })
        ));
        for url in ["redis+sentinel://me:secret@a:26379", "redis+sentinel://me:secret@a:26379/"] {
            let Err(Error::Invalid { message }) = parse(url) else { panic!("{url}") };
            assert!(message.contains("no name of a master") && !message.contains("secret"), "{message}");
        }
    }

    #[test]
    fn messages_have_no_password() {
        for url in [
            "me:secret@host",
            "redis:/me:secret@host",
            "redis://me:sec?ret@host",
            "redis://me:sec?ret@host?x=secret",
            "redis://me:se@cret@host:x",
            "redis+sentinel://a/?sentinel_password=sec@ret",
        ] {
            let Err(Error::Invalid { message }) = parse(url) else { panic!("{url}") };
            assert!(!message.contains("ret"), "{url}: {message}");
        }
        assert_eq!(without_password("redis://me:p@host:x/1?pass=p"), "redis://***@host:x/1***");
        assert_eq!(without_password("redis://host/1"), "redis://host/1");
    }

    #[test]
    fn sentinel_address_has_its_own_password() {
        assert!(parse("redis+sentinel://me:secret@a/mymaster?sentinel_user=s&sentinel_password=x%40y").is_ok());
        let Err(Error::Invalid { message }) = parse("redis+sentinel://a/mymaster?sentinel_passwort=secret") else {
            panic!()
        };
        assert!(message.contains("no such option") && !message.contains("secret"), "{message}");
    }

    #[test]
    fn invalid_address_is_refused_with_allowed_forms() {
        for url in ["localhost", "http://localhost", "redis+nonsense://a"] {
            let Err(Error::Invalid { message }) = parse(url) else { panic!("{url}") };
            assert!(message.contains(url) && message.contains("redis+sentinel://"), "{message}");
        }
    }
}
